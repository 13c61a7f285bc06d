"""Recipes: the windows that each one draws, and the same windows as the loop that defines it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import METHODS, Span, WindowSizes, WindowSpans, find_method, methods
from scoremode.errors import CorpusError, MethodError
from tests.core.plan.streams import FACTS, plan_for, tokens_of

Loop = Callable[[int, int, int, int], Iterator[Span]]
BOS = FACTS.bos or 0


def drawn(plan: Plan) -> list[tuple[list[int], list[int]]]:
    """Each window as (stream indices fed, stream indices scored); -1 is a lead."""
    windows = []
    for w in range(len(plan)):
        lead = [-1] if plan.lead[w] >= 0 else []
        fed = lead + list(range(int(plan.start[w]), int(plan.stop[w])))
        windows.append((fed, list(range(int(plan.first[w]), int(plan.last[w])))))
    return windows


def test_the_counts_that_the_field_knows() -> None:
    once = plan_for("sliding-once", 39_217, context=2048, stride=512)
    assert (len(once), once.targets) == (74, 39_216)
    assert once.lengths[-1] < 2048
    again = plan_for("exl3-2025", 39_217, context=2048, stride=512)
    assert (len(again), again.targets, again.forward_tokens) == (73, 149_431, 73 * 2048)


DRAWINGS: dict[str, tuple[tuple[int, ...], int, int | None, list[tuple[list[int], list[int]]]]] = {
    "sliding-once": ((7,), 4, 2, [([0, 1, 2, 3], [1, 2, 3]), ([2, 3, 4, 5], [4, 5]), ([4, 5, 6], [6])]),
    "exl3-2025": ((7,), 4, 2, [([0, 1, 2, 3], [1, 2, 3]), ([2, 3, 4, 5], [3, 4, 5])]),
    "exl3-2026": ((9,), 4, None, [([0, 1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7], [5, 6, 7])]),
    "gptq": ((9,), 4, None, [([0, 1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7], [5, 6, 7])]),
    "llamacpp": ((9,), 4, None, [([-1, 1, 2, 3], [3]), ([-1, 5, 6, 7], [7])]),
    "hf-stride": ((7,), 4, 2, [([0, 1, 2, 3], [1, 2, 3]), ([2, 3, 4, 5], [4, 5]), ([4, 5, 6], [6])]),
    "lm-eval-rolling": ((7,), 4, None, [([-1, 0, 1, 2], [0, 1, 2, 3]), ([2, 3, 4, 5], [4, 5, 6])]),
    "mean-of-texts": ((3, 2), 4, None, [([-1, 0, 1, 2], [0, 1, 2]), ([-1, 3, 4], [3, 4])]),
}


@pytest.mark.parametrize("name", METHODS)
def test_windows_are_as_drawn_in_the_docstring(name: str) -> None:
    lengths, context, stride, expected = DRAWINGS[name]
    assert drawn(plan_for(name, *lengths, context=context, stride=stride)) == expected


def test_llamacpp_puts_a_bos_in_front_if_the_tokenizer_does() -> None:
    plan = plan_for("llamacpp", 1024, context=512)
    assert (plan.target_counts.tolist(), plan.window(0).ids[0]) == ([255, 255], FACTS.bos)
    assert plan.window(0).rows[[0, -1]].tolist() == [256, 510]
    assert make_plan(find_method("llamacpp"), tokens_of(9, facts=replace(FACTS, bos=0)), context_length=4).lead[0] == 0
    tokens = tokens_of(9, facts=replace(FACTS, adds_bos=False))
    assert make_plan(find_method("llamacpp"), tokens, context_length=4).lead.tolist() == [-1, -1]
    assert drawn(make_plan(find_method("llamacpp"), tokens, context_length=4)) == [
        ([0, 1, 2, 3], [3]),
        ([4, 5, 6, 7], [7]),
    ]


@pytest.mark.parametrize(("bos", "eos", "prefix"), [(7, 8, 7), (0, 8, 0), (None, 8, 8), (None, 0, 0)])
def test_lm_eval_puts_bos_before_a_document_else_eos(bos: int | None, eos: int, prefix: int) -> None:
    tokens = tokens_of(9, facts=replace(FACTS, bos=bos, eos=eos))
    assert make_plan(find_method("lm-eval-rolling"), tokens, context_length=4).lead.tolist() == [prefix, -1, -1]


def test_a_name_never_changes_its_meaning() -> None:
    """Arrangement, special tokens, context, stride, limit and average, as published numbers have them."""
    flags = ("real_vocabulary", "fits_model", "whole_documents", "independent_error")
    sizes = {
        m.name: (
            m.arrangement,
            m.special,
            m.context,
            m.stride,
            m.max_windows,
            m.average,
            *filter(m.__getattribute__, flags),
        )
        for m in METHODS.values()
    }
    assert sizes == {
        "sliding-once": ("join-lines", True, 2048, 512, 0, "token", "fits_model"),
        "exl3-2025": ("join-rows", True, 2048, 512, 100, "token"),
        "exl3-2026": ("join-rows", False, 2048, None, 100, "token", "real_vocabulary"),
        "gptq": ("join-rows", True, 2048, None, 0, "token"),
        "llamacpp": ("raw-file", True, 512, None, 0, "token", "independent_error"),
        "hf-stride": ("join-rows", True, None, 512, 0, "window"),
        "lm-eval-rolling": ("pages", True, None, None, 0, "token", "whole_documents"),
        "mean-of-texts": ("texts", False, None, None, 0, "document"),
    }


def test_a_package_gives_a_method_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(find_method("gptq"), name="mine")
    points = {"mine": method, "other-name": method, "no-method": print, "gptq": method}
    entry_points = [SimpleNamespace(name=n, dist=None, load=lambda loaded=m: loaded) for n, m in points.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entry_points)
    methods.cache_clear()
    try:
        assert (find_method("mine"), find_method("gptq")) == (method, METHODS["gptq"])
        for name, words in (
            ("other-name", "but the method itself 'mine'"),
            ("no-method", "is not a scoremode.core.plan"),
        ):
            with pytest.raises(MethodError, match=f"the method '{name}' cannot be used; {name} of .*{words}"):
                find_method(name)
        with pytest.raises(MethodError, match="there is no method 'gptk'; did you mean 'gptq'"):
            find_method("gptk")
    finally:
        methods.cache_clear()


# ── the loops that define them ───────────────────────────────────────────────────────────────────────────────────────
def sliding_once(begin: int, end: int, context: int, stride: int) -> Iterator[Span]:
    scored, start = begin + 1, begin
    while scored < end:
        start = min(start, scored - 1)
        stop = min(start + context, end)
        yield Span(start, stop, scored, stop)
        scored = stop
        start += stride


def exl3_2025(begin: int, end: int, context: int, stride: int) -> Iterator[Span]:
    for start in range(begin, end - context, stride):
        yield Span(start, start + context, start + 1, start + context)


def gptq(begin: int, end: int, context: int, stride: int) -> Iterator[Span]:
    for start in range(begin, end - context + 1, context):
        yield Span(start, start + context, start + 1, start + context)


def llamacpp(begin: int, end: int, context: int, stride: int) -> Iterator[Span]:
    for start in range(begin, end - context + 1, context):
        yield Span(start + 1, start + context, start + context // 2 + 1, start + context, lead=BOS)


def hf_stride(begin: int, end: int, context: int, stride: int) -> Iterator[Span]:
    reached = begin
    for start in range(begin, end, stride):
        stop = min(start + context, end)
        first = max(reached, start + 1)
        if first < stop:
            yield Span(start, stop, first, stop, weight=float(stop - reached - 1))
        reached = stop
        if stop == end:
            break


def mean_of_texts(begin: int, end: int, context: int, stride: int) -> Iterator[Span]:
    stop = min(end, begin + context - 1)
    if stop > begin:
        yield Span(begin, stop, begin, stop, lead=BOS)


def lm_eval_rolling(begin: int, end: int, context: int, stride: int) -> Iterator[Span]:
    for scored in range(begin, end, context):
        last = min(scored + context, end)
        start = begin if scored == begin else last - context - 1
        yield Span(start, last - 1, scored, last, lead=BOS if scored == begin else -1)


LOOPS: dict[str, Loop] = {
    "sliding-once": sliding_once,
    "exl3-2025": exl3_2025,
    "exl3-2026": lambda begin, end, context, stride: exl3_2025(begin, end, context, context),
    "gptq": gptq,
    "llamacpp": llamacpp,
    "hf-stride": hf_stride,
    "lm-eval-rolling": lm_eval_rolling,
    "mean-of-texts": mean_of_texts,
}


@pytest.mark.parametrize("name", METHODS)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), context=st.integers(3, 12), stride=st.integers(1, 12)
)
def test_arithmetic_gives_the_windows_of_the_loop(name: str, lengths: list[int], context: int, stride: int) -> None:
    tokens, sizes = tokens_of(*lengths), WindowSizes(context, min(stride, context))
    try:
        windows = METHODS[name].windows(tokens, sizes)
    except CorpusError:
        assert name == "llamacpp"
        assert min(lengths) < 2 * context
        return
    edges = tokens.doc_starts.tolist()
    pairs = pairwise(edges)
    expected = WindowSpans.of(span for begin, end in pairs for span in LOOPS[name](begin, end, context, sizes.stride))
    assert isinstance(windows, WindowSpans)
    for column in ("start", "stop", "first", "last", "lead"):
        assert getattr(windows, column).dtype == getattr(expected, column).dtype, column
        assert getattr(windows, column).tolist() == getattr(expected, column).tolist(), column
    if name == "hf-stride":
        assert windows.weight is not None
        assert expected.weight is not None
        assert windows.weight.tolist() == expected.weight.tolist()


@pytest.mark.parametrize("name", ["sliding-once", "hf-stride"])
def test_a_method_that_gives_spans_one_by_one_makes_the_same_plan(name: str) -> None:
    method, tokens = find_method(name), tokens_of(40, 3, 17)

    def one_by_one(given_tokens: object, sizes: WindowSizes) -> Iterator[Span]:
        edges = tokens.doc_starts.tolist()
        for begin, end in pairwise(edges):
            yield from LOOPS[name](begin, end, sizes.context, sizes.stride)

    plugin = replace(method, windows=one_by_one)
    made, again = (make_plan(m, tokens, context_length=8, stride=4) for m in (method, plugin))
    assert made.digest == again.digest


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(2, 24), st.floats(0, 1))
def test_each_token_is_scored_exactly_once(lengths: list[int], context: int, step: float) -> None:
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    for name, unscored in (("sliding-once", 1), ("lm-eval-rolling", 0)):  # after a prefix, even the first has context
        windows = METHODS[name].windows(tokens_of(*lengths), WindowSizes(context, max(1, round(step * context))))
        assert isinstance(windows, WindowSpans)
        scored = [i for first, last in zip(windows.first, windows.last, strict=True) for i in range(first, last)]
        assert scored == [i for begin, end in pairwise(edges) for i in range(begin + unscored, end)]
