"""Windows as arithmetic: the same windows as the loops that define the recipes, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import METHODS, Span, WindowSizes, WindowSpans, find_method, rolling_spans
from scoremode.errors import CorpusError
from tests.core.plan.test_recipes import tokens_of

Loop = Callable[[int, int, int, int], Iterator[Span]]
BOS = 7


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


LOOPS: dict[str, Loop] = {
    "sliding-once": sliding_once,
    "exl3-2025": exl3_2025,
    "exl3-2026": lambda begin, end, context, stride: exl3_2025(begin, end, context, context),
    "gptq": gptq,
    "llamacpp": llamacpp,
    "hf-stride": hf_stride,
    "lm-eval-rolling": lambda begin, end, context, stride: rolling_spans(begin, end, context, BOS),
    "mean-of-texts": mean_of_texts,
}


def test_every_method_has_its_loop() -> None:
    assert LOOPS.keys() == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), context=st.integers(3, 12), stride=st.integers(1, 12)
)
def test_arithmetic_gives_the_windows_of_the_loop(name: str, lengths: list[int], context: int, stride: int) -> None:
    tokens, sizes = tokens_of(*lengths), WindowSizes(context, min(stride, context))
    try:
        found = METHODS[name].windows(tokens, sizes)
    except CorpusError:
        assert name == "llamacpp"
        assert min(lengths) < 2 * context
        return
    edges = tokens.doc_starts.tolist()
    pairs = pairwise(edges)
    wanted = WindowSpans.of(span for begin, end in pairs for span in LOOPS[name](begin, end, context, sizes.stride))
    assert isinstance(found, WindowSpans)
    for column in ("start", "stop", "first", "last", "lead"):
        assert getattr(found, column).dtype == getattr(wanted, column).dtype, column
        assert getattr(found, column).tolist() == getattr(wanted, column).tolist(), column
    if name == "hf-stride":
        assert found.weight is not None
        assert wanted.weight is not None
        assert found.weight.tolist() == wanted.weight.tolist()


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


def plans() -> list[Plan]:
    one, several = tokens_of(90), tokens_of(40, 1, 25, 33)
    masked = tokens_of(40, 30)
    object.__setattr__(masked, "target_mask", np.random.default_rng(0).random(70) < 0.4)
    sizes: dict[str, Any] = {name: {"stride": 5} if m.stride else {} for name, m in METHODS.items()}
    return [
        make_plan(find_method(name), given, context_length=16, **sizes[name])
        for name in METHODS
        for given in (one, several, masked)
        if name != "llamacpp" or given is one
    ]


@pytest.mark.parametrize("plan", plans(), ids=repr)
def test_targets_are_those_of_the_windows(plan: Plan) -> None:
    windows = [plan.window(index) for index in range(len(plan))]
    ids = np.concatenate([window.targets[:, 0] for window in windows])
    assert np.array_equal(plan.ids[plan.target_token], ids)
    assert np.array_equal(plan.target_window, np.repeat(np.arange(len(plan)), [len(w.rows) for w in windows]))
    assert (plan.doc_starts[plan.target_document] <= plan.target_token).all()
    assert (plan.target_token < plan.doc_starts[plan.target_document + 1]).all()
    assert plan.covered == len(np.unique(plan.target_token))
