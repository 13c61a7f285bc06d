"""Tokens ─▶ Plan: one function per recipe, with its windows drawn in its docstring.

In the drawings a number is a token of the stream, ``[…]`` are the tokens of one forward pass, and B is a BOS that the
recipe itself inserts. A BOS that the tokenizer adds is the ordinary token 0 of the stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from scoremode.core import entry_points
from scoremode.core.entry_points import Plugins
from scoremode.core.plan.plan import Average
from scoremode.core.text.documents import Arrangement
from scoremode.core.text.tokens import Tokens
from scoremode.errors import CorpusError, MethodError, did_you_mean
from scoremode.values import Bools, Floats, Ids, Ints


class Span(NamedTuple):
    """One window: feeds ``[lead] + ids[start:stop]``, scores ``ids[first:last]``; its mean counts ``weight`` times."""

    start: int
    stop: int
    first: int
    last: int
    lead: int = -1
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """The sizes that a recipe receives in addition to the tokens."""

    context: int
    stride: int


@dataclass(frozen=True, slots=True, eq=False)
class WindowSpans:
    """Many windows as columns, with one array for each field of Span."""

    start: Ints
    stop: Ints
    first: Ints
    last: Ints
    lead: Ids
    weight: Floats | None = None  # None: each window counts once

    def __len__(self) -> int:
        return len(self.start)

    def taken(self, which: slice | Bools) -> WindowSpans:
        weight = None if self.weight is None else self.weight[which]
        return WindowSpans(
            self.start[which], self.stop[which], self.first[which], self.last[which], self.lead[which], weight
        )

    @staticmethod
    def of(spans: Iterable[Span]) -> WindowSpans:
        """Converts windows to columns. Methods of other packages give windows one by one."""
        whole, weights = array("q"), array("d")
        for span in spans:
            whole.extend(map(int, span[:5]))
            weights.append(span.weight)
        columns = np.array(whole, np.int64).reshape(-1, 5).T
        start, stop, first, last, lead = (np.ascontiguousarray(column) for column in columns)
        return WindowSpans(start, stop, first, last, lead.astype(np.int32), np.array(weights, np.float64))


Windows = Callable[[Tokens, WindowSizes], "WindowSpans | Iterator[Span]"]


@dataclass(frozen=True, slots=True)
class Method:
    """A named, dated rule that makes a plan from tokens."""

    name: str
    summary: str
    windows: Windows
    arrangement: Arrangement
    special: bool  # does the tokenizer add its special tokens?
    context: int | None = None  # the recipe's window; None: the model's whole context
    stride: int | None = None  # the recipe's stride; None: the recipe has no stride
    max_windows: int = 0  # the recipe's own limit; 0: all
    average: Average = "token"
    real_vocabulary: bool = False  # are logits after the tokenizer's last id excluded from the softmax?
    fits_model: bool = False  # is its own context cut to that of a model? Then no published result depends on it
    whole_documents: bool = False  # are bytes and words those of whole source documents?
    independent_error: bool = False  # does its tool also print an error as if tokens were independent?


def _in_documents(tokens: Tokens, counts: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns for each window the start and end of its document, and its number in the document: 0, 1, …

    ``counts`` are the windows per document.
    """
    begin, end = (np.repeat(edge, counts) for edge in (tokens.doc_starts[:-1], tokens.doc_starts[1:]))
    number = np.arange(len(begin), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return begin, end, number


def _lengths(tokens: Tokens) -> Ints:
    return np.diff(tokens.doc_starts)


def _steps(length: Ints, step: int) -> Ints:
    """Returns how many steps it takes to cover each length; 0 if the length is not positive."""
    return -(-np.maximum(length, 0) // step)


def _no_lead(count: int) -> Ids:
    return np.full(count, -1, np.int32)


def sliding_once(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Overlapping windows, each token scored once, in the first window that reaches it (the usual strided evaluation).

    tokens   0 1 2 3 4 5 6    context=4, stride=2
    feed    [0 1 2 3]         score 1 2 3
                [2 3 4 5]     score 4 5
                    [4 5 6]   score 6      a partial last window is kept
    """
    step, length = min(sizes.stride, sizes.context - 1), _lengths(tokens)  # at least one token of context stays
    counts = np.where(length < 2, 0, 1 + _steps(length - sizes.context, step))
    begin, end, number = _in_documents(tokens, counts)
    start = begin + number * step
    stop = np.minimum(start + sizes.context, end)
    first = np.where(number == 0, begin + 1, start - step + sizes.context)
    return WindowSpans(start, stop, first, stop, _no_lead(len(start)))


def exl3_2025(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Every target of every window, overlaps counted again (the published EXL3 plots of 2025).

    tokens   0 1 2 3 4 5 6    context=4, stride=2
    feed    [0 1 2 3]         score 1 2 3
                [2 3 4 5]     score     3 4 5
                              full windows only, and none that would end at the last token
    """
    begin, _, number = _in_documents(tokens, _steps(_lengths(tokens) - sizes.context, sizes.stride))
    start = begin + number * sizes.stride
    return _all_targets(start, sizes.context)


def _all_targets(start: Ints, context: int) -> WindowSpans:
    """Returns full windows that begin at ``start``. In each, all tokens except the first are scored."""
    stop = start + context
    return WindowSpans(start, stop, start + 1, stop, _no_lead(len(start)))


def exl3_2026(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Windows that do not overlap, no BOS anywhere, none that would end at the last token (EXL3's ppl.py of 2026).

    tokens   0 1 2 3 4 5 6 7 8    context=4
    feed    [0 1 2 3]             score 1 2 3
                    [4 5 6 7]     score 5 6 7
    """
    return exl3_2025(tokens, WindowSizes(sizes.context, sizes.context))


def gptq(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Windows that do not overlap, the tail dropped (the tables of the GPTQ paper and those after it).

    tokens   0 1 2 3 4 5 6 7 8    context=4
    feed    [0 1 2 3]             score 1 2 3
                    [4 5 6 7]     score 5 6 7
    """
    begin, _, number = _in_documents(tokens, _lengths(tokens) // sizes.context)
    return _all_targets(begin + number * sizes.context, sizes.context)


def llamacpp(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Chunks that do not overlap; the second half of each is scored, and BOS replaces its first token (llama.cpp).

    tokens   0 1 2 3 4 5 6 7 8    context=4, a tokenizer that adds BOS
    feed    [B 1 2 3]             score 3
                    [B 5 6 7]     score 7      logits context/2 … context-2
    """
    if sizes.context < 3:
        raise MethodError("llamacpp scores nothing in a context below 3", fix="give --context-length 3 or more")
    length = _lengths(tokens)
    short = length[length < 2 * sizes.context]
    if len(short):
        fits = int(short[0]) // 2
        raise CorpusError(
            f"llamacpp needs at least {2 * sizes.context} tokens (two contexts), the text has {short[0]}",
            fix="give a longer text" + (f" or --context-length {fits}" if fits >= 3 else ""),
        )
    return llamacpp_chunks(tokens, sizes)


def llamacpp_chunks(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Returns the windows of llamacpp for a text of any length: a stored chunk comes from a text that is not known."""
    facts = tokens.tokenizer
    bos = facts.bos if facts.adds_bos and facts.bos is not None else -1
    chunks = gptq(tokens, sizes)
    first = chunks.start + sizes.context // 2 + 1
    lead = np.full(len(chunks), bos, np.int32)
    return WindowSpans(chunks.start + (bos >= 0), chunks.stop, first, chunks.last, lead)


def hf_stride(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """The windows of sliding-once, averaged as the loop in the Transformers documentation does.

    tokens   0 1 2 3 4 5 6    context=4, stride=2
    feed    [0 1 2 3]         score 1 2 3   mean counted 3 times
                [2 3 4 5]     score 4 5     mean counted 1 time (new tokens - 1, although both are in it)
                    [4 5 6]   score 6       mean counted 0 times
    """
    length = _lengths(tokens)
    counts = np.where(length < 1, 0, 1 + _steps(length - sizes.context, sizes.stride))
    begin, end, number = _in_documents(tokens, counts)
    start = begin + number * sizes.stride
    stop = np.minimum(start + sizes.context, end)
    reached = np.where(number == 0, begin, start - sizes.stride + sizes.context)
    first = np.maximum(reached, start + 1)  # if the stride is the whole context, the first token has no context
    weight = (stop - reached - 1).astype(np.float64)
    return WindowSpans(start, stop, first, stop, _no_lead(len(start)), weight).taken(first < stop)


def lm_eval_rolling(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Each document alone after a prefix token, each token predicted once; the last window is moved back to be full.

    tokens    0 1 2 3 4 5 6    context=4
    feed   [B 0 1 2]           score 0 1 2 3
                [2 3 4 5]      score 4 5 6     a row predicts the token after it, so 3 and 6 need not be fed

    The prefix is BOS, else EOS. The tokenizer also adds its own special tokens: if it adds BOS, there are two, and the
    second is scored.
    """
    facts, context = tokens.tokenizer, sizes.context
    prefix = facts.eos if facts.bos is None else facts.bos
    if prefix is None:
        message = "this tokenizer has neither BOS nor EOS to insert before a document"
        raise MethodError(message, fix="use --method sliding-once")
    begin, end, number = _in_documents(tokens, _steps(_lengths(tokens), context))
    is_first, first = number == 0, begin + number * context
    last = np.minimum(first + context, end)
    start = np.where(is_first, begin, last - context - 1)
    return WindowSpans(start, last - 1, first, last, np.where(is_first, prefix, -1).astype(np.int32))


def mean_of_texts(tokens: Tokens, sizes: WindowSizes) -> WindowSpans:
    """Each text alone after a BOS, then the arithmetic mean of the texts' perplexities (HF evaluate's metric).

    tokens    0 1 2 | 3 4    two texts
    feed   [B 0 1 2]         score 0 1 2
                   [B 3 4]   score 3 4
    """
    bos = tokens.tokenizer.bos
    if bos is None:
        raise MethodError("this tokenizer has no BOS to insert before a text", fix="use --method lm-eval-rolling")
    begin, end = tokens.doc_starts[:-1], tokens.doc_starts[1:]
    stop = np.minimum(end, begin + sizes.context - 1)
    return WindowSpans(begin, stop, begin, stop, np.full(len(begin), bos, np.int32)).taken(stop > begin)


_BUILT_IN = (
    Method(
        "sliding-once",
        "overlapping windows, each token scored once",
        sliding_once,
        "join-lines",
        True,
        2048,
        512,
        fits_model=True,
    ),
    Method("exl3-2025", "overlapping windows, overlaps counted again", exl3_2025, "join-rows", True, 2048, 512, 100),
    Method(
        "exl3-2026", "disjoint windows, no BOS", exl3_2026, "join-rows", False, 2048, None, 100, real_vocabulary=True
    ),
    Method("gptq", "disjoint windows, tail dropped", gptq, "join-rows", True, 2048),
    Method("llamacpp", "disjoint chunks, second half scored", llamacpp, "raw-file", True, 512, independent_error=True),
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
        whole_documents=True,
    ),
    Method(
        "mean-of-texts",
        "texts alone after a BOS, arithmetic mean of their perplexities",
        mean_of_texts,
        "texts",
        False,
        average="document",
    ),
)

METHODS: dict[str, Method] = {method.name: method for method in _BUILT_IN}


def find_method(name: str) -> Method:
    """Returns the method with this name. Raises MethodError with the nearest name if there is none."""
    plugins = methods()
    for refused in plugins.refused:
        if refused.name == name and name not in METHODS:
            raise MethodError(f"the method '{name}' cannot be used", fix=str(refused))
    if name not in plugins.found:
        raise MethodError(f"there is no method '{name}'", fix=did_you_mean(name, plugins.found))
    return plugins.found[name]


@cache
def methods() -> Plugins[Method]:
    """Returns built-in methods, those of other packages (entry points "scoremode.methods"), and the refused ones."""
    theirs = entry_points.load("scoremode.methods", METHODS, _accepted)
    return Plugins({**METHODS, **theirs.found}, theirs.refused)


def _accepted(name: str, loaded: object) -> Method:
    if not isinstance(loaded, Method):
        raise ValueError("it is not a scoremode.core.plan.recipes.Method; ask its author to fix it")
    if loaded.name != name:
        raise ValueError(f"its entry point is named '{name}' but the method itself '{loaded.name}'")
    return loaded
