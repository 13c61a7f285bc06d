"""Tokens ─▶ Plan: one function per recipe, with its windows drawn in its docstring.

In the drawings a number is a token of the stream, ``[…]`` is what one forward pass is fed, and B is a BOS that the
recipe itself inserts. A BOS that the tokenizer adds is an ordinary token 0 of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from scoremode.arguments import require_text
from scoremode.errors import CorpusError, MethodError, did_you_mean
from scoremode.plan.plan import Average
from scoremode.text import plugins
from scoremode.text.documents import Arrangement
from scoremode.text.plugins import Plugins
from scoremode.text.tokens import Tokens


class Span(NamedTuple):
    """One window: feeds ``[lead] + ids[start:stop]``, scores ``ids[first:last]``; its mean counts ``weight`` times."""

    start: int
    stop: int
    first: int
    last: int
    lead: int = -1
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a recipe receives in addition to the tokens."""

    context: int
    stride: int


Windows = Callable[[Tokens, Sizes], Iterator[Span]]


@dataclass(frozen=True, slots=True)
class Method:
    """A named, dated rule that makes a plan from tokens."""

    name: str
    summary: str
    windows: Windows
    arrangement: Arrangement
    special: bool  # does the tokenizer add its special tokens?
    context: int | None  # the recipe's window; None: the model's whole context
    stride: int | None  # the recipe's stride; None: the recipe has no stride
    max_windows: int = 0  # the recipe's own limit; 0: all
    average: Average = "token"
    real_vocabulary: bool = False  # are logits after the tokenizer's last id left out of the softmax?


def _documents(tokens: Tokens) -> Iterator[tuple[int, int]]:
    yield from zip(tokens.doc_starts[:-1].tolist(), tokens.doc_starts[1:].tolist(), strict=True)


def sliding_once(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """Overlapping windows, each token scored once, in the first window that reaches it (the usual strided evaluation).

    tokens   0 1 2 3 4 5 6    context=4, stride=2
    feed    [0 1 2 3]         score 1 2 3
                [2 3 4 5]     score 4 5
                    [4 5 6]   score 6      a partial last window is kept
    """
    for begin, end in _documents(tokens):
        scored, start = begin + 1, begin
        while scored < end:
            start = min(start, scored - 1)  # if the stride is the whole context, keep one token of context
            stop = min(start + sizes.context, end)
            yield Span(start, stop, scored, stop)
            scored = stop
            start += sizes.stride


def exl3_2025(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """Every target of every window, overlaps counted again (the published EXL3 plots of 2025).

    tokens   0 1 2 3 4 5 6    context=4, stride=2
    feed    [0 1 2 3]         score 1 2 3
                [2 3 4 5]     score     3 4 5
                              full windows only, and none that would end at the last token
    """
    for begin, end in _documents(tokens):
        for start in range(begin, end - sizes.context, sizes.stride):
            yield Span(start, start + sizes.context, start + 1, start + sizes.context)


def exl3_2026(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """Windows that do not overlap, no BOS anywhere, none that would end at the last token (EXL3's ppl.py of 2026).

    tokens   0 1 2 3 4 5 6 7 8    context=4
    feed    [0 1 2 3]             score 1 2 3
                    [4 5 6 7]     score 5 6 7
    """
    yield from exl3_2025(tokens, Sizes(sizes.context, sizes.context))


def gptq(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """Windows that do not overlap, the tail dropped (the tables of the GPTQ paper and those after it).

    tokens   0 1 2 3 4 5 6 7 8    context=4
    feed    [0 1 2 3]             score 1 2 3
                    [4 5 6 7]     score 5 6 7
    """
    for begin, end in _documents(tokens):
        for start in range(begin, end - sizes.context + 1, sizes.context):
            yield Span(start, start + sizes.context, start + 1, start + sizes.context)


def llamacpp(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """Chunks that do not overlap; the second half of each is scored, and BOS replaces its first token (llama.cpp).

    tokens   0 1 2 3 4 5 6 7 8    context=4, a tokenizer that adds BOS
    feed    [B 1 2 3]             score 3
                    [B 5 6 7]     score 7      logits context/2 … context-2
    """
    if sizes.context < 3:
        raise MethodError("llamacpp scores nothing in a context below 3", fix="give --context-length 3 or more")
    for begin, end in _documents(tokens):
        if end - begin < 2 * sizes.context:
            raise CorpusError(
                f"llamacpp needs at least {2 * sizes.context} tokens (two contexts), the text has {end - begin}",
                fix=f"give a longer text or --context-length {max(4, (end - begin) // 2)}",
            )
    yield from llamacpp_chunks(tokens, sizes)


def llamacpp_chunks(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """The windows of llamacpp, however short the text is: a stored chunk was cut from a text that is not known."""
    facts = tokens.tokenizer
    bos = facts.bos if facts.adds_bos and facts.bos is not None else -1
    for begin, end in _documents(tokens):
        for start in range(begin, end - sizes.context + 1, sizes.context):
            stop, first = start + sizes.context, start + sizes.context // 2 + 1
            yield Span(start + (bos >= 0), stop, first, stop, lead=bos)


def hf_stride(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """The windows of sliding-once, averaged as the loop in the Transformers documentation does.

    tokens   0 1 2 3 4 5 6    context=4, stride=2
    feed    [0 1 2 3]         score 1 2 3   mean counted 3 times
                [2 3 4 5]     score 4 5     mean counted 1 time (new tokens - 1, although both are in it)
                    [4 5 6]   score 6       mean counted 0 times
    """
    for begin, end in _documents(tokens):
        reached = begin
        for start in range(begin, end, sizes.stride):
            stop = min(start + sizes.context, end)
            new = stop - reached
            first = max(reached, start + 1)  # a stride of the whole context leaves the first token without context
            if first < stop:
                yield Span(start, stop, first, stop, weight=float(new - 1))
            reached = stop
            if stop == end:
                break


def lm_eval_rolling(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """Each document alone after a prefix token, each token predicted once; the last window is moved back to be full.

    tokens    0 1 2 3 4 5 6    context=4
    feed   [B 0 1 2]           score 0 1 2 3
                [2 3 4 5]      score 4 5 6     a row predicts the token after it, so 3 and 6 need not be fed

    The tokenizer also adds its own special tokens: if it adds BOS, there are two, and the second is scored.
    """
    prefix = prefix_token(tokens)
    for begin, end in _documents(tokens):
        yield from rolling_spans(begin, end, sizes.context, prefix)


def rolling_spans(begin: int, end: int, context: int, prefix: int) -> Iterator[Span]:
    """The windows of lm-eval-rolling over one document, the tokens from ``begin`` to ``end``."""
    scored = min(begin + context, end)
    if scored > begin:
        yield Span(begin, scored - 1, begin, scored, lead=prefix)
    while scored < end:
        last = min(scored + context, end)
        yield Span(last - context - 1, last - 1, scored, last)
        scored = last


def prefix_token(tokens: Tokens) -> int:
    """BOS, else EOS: the token that lm-evaluation-harness inserts before a document."""
    facts = tokens.tokenizer
    if facts.bos is None and facts.eos is None:
        raise MethodError(
            "this tokenizer has neither BOS nor EOS to insert before a document", fix="use --method sliding-once"
        )
    return facts.bos if facts.bos is not None else int(facts.eos or 0)


def mean_of_texts(tokens: Tokens, sizes: Sizes) -> Iterator[Span]:
    """Each text alone after a BOS, then the arithmetic mean of the texts' perplexities (HF evaluate's metric).

    tokens    0 1 2 | 3 4    two texts
    feed   [B 0 1 2]         score 0 1 2
                   [B 3 4]   score 3 4
    """
    bos = tokens.tokenizer.bos
    if bos is None:
        raise MethodError("this tokenizer has no BOS to insert before a text", fix="use --method lm-eval-rolling")
    for begin, end in _documents(tokens):
        stop = min(end, begin + sizes.context - 1)
        if stop > begin:
            yield Span(begin, stop, begin, stop, lead=bos)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "sliding-once", "overlapping windows, each token scored once", sliding_once, "join-lines", True, 2048, 512
        ),
        Method(
            "exl3-2025", "overlapping windows, overlaps counted again", exl3_2025, "join-rows", True, 2048, 512, 100
        ),
        Method(
            "exl3-2026",
            "disjoint windows, no BOS",
            exl3_2026,
            "join-rows",
            False,
            2048,
            None,
            100,
            real_vocabulary=True,
        ),
        Method("gptq", "disjoint windows, tail dropped", gptq, "join-rows", True, 2048, None),
        Method("llamacpp", "disjoint chunks, second half scored", llamacpp, "raw-file", True, 512, None),
        Method(
            "hf-stride",
            "sliding-once windows, their means weighted as in the Transformers docs",
            hf_stride,
            "join-rows",
            True,
            None,
            512,
            average="window",
        ),
        Method(
            "lm-eval-rolling",
            "documents alone after a prefix token, each token once",
            lm_eval_rolling,
            "pages",
            True,
            None,
            None,
        ),
        Method(
            "mean-of-texts",
            "texts alone after a BOS, arithmetic mean of their perplexities",
            mean_of_texts,
            "texts",
            False,
            None,
            None,
            average="document",
        ),
    )
}


def find_method(name: str) -> Method:
    """The method of that name; MethodError with the nearest name if there is none."""
    require_text("method", name)
    known = methods()
    for refused in known.refused:
        if refused.name == name and name not in METHODS:
            raise MethodError(f"the method '{name}' cannot be used", fix=str(refused))
    if name not in known.found:
        raise MethodError(f"there is no method '{name}'", fix=did_you_mean(name, known.found))
    found: Method = known.found[name]
    return found


@cache
def methods() -> Plugins:
    """The built-in methods, those of other packages (entry points "scoremode.methods"), and the refused ones."""
    theirs = plugins.load("scoremode.methods", METHODS, _accepted)
    return Plugins({**METHODS, **theirs.found}, theirs.refused)


def _accepted(name: str, loaded: object) -> Method:
    if not isinstance(loaded, Method):
        raise ValueError("it is not a scoremode.plan.recipes.Method; ask its author to fix it")
    if loaded.name != name:
        raise ValueError(f"its entry point is named '{name}' but the method itself '{loaded.name}'")
    return loaded
