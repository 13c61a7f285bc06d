"""Groups of windows that share a forward pass: each window once, little computed twice, and the same scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core.engine.batching import PADDING_SHARE, batches_by_length, common_prefix
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.scores.answers import Window, WindowList, measured
from scoremode.engines.transformers.batches import fed, pack, passes
from scoremode.values import Ints


def groups_of(prompts: list[int], choices: list[int], rest: int = 3) -> WindowList:
    """Questions with prompts of these lengths; all choices of one begin alike and then differ."""
    windows, numbers = [], []
    for question, (prompt, count) in enumerate(zip(prompts, choices, strict=True)):
        for choice in range(count):
            ids = np.concatenate([np.full(prompt, 5 + question % 200), np.full(rest, 10 + choice)]).astype(np.int32)
            rows = np.arange(prompt - 1, len(ids), dtype=np.int32)
            windows.append(Window(ids, rows, np.full((len(rows), 1), 7, np.int32)))
            numbers.append(question)
    return WindowList(tuple(windows), np.array(numbers, dtype=np.int64))


def packed(source: WindowList, budget: int, cost: int) -> list[Ints]:
    return pack(source, batches_by_length(source, budget), budget, cost)


@given(
    st.lists(st.tuples(st.integers(2, 90), st.integers(1, 5)), max_size=25), st.integers(16, 600), st.integers(0, 64)
)
def test_every_window_once_and_little_is_fed_again(questions: list[tuple[int, int]], budget: int, cost: int) -> None:
    source = groups_of([p for p, _ in questions], [c for _, c in questions])
    batches = packed(source, budget, cost)
    assert sorted(i for b in batches for i in b.tolist()) == list(range(len(source)))
    assert source.prefix_group is not None
    for batch in batches:
        numbers = source.prefix_group[batch]
        inside = list(dict.fromkeys(numbers.tolist()))
        if len(inside) == len(batch) or len(inside) == 1:
            continue  # single windows by length, or one group, which stays whole however large it is
        prompts = {
            n: common_prefix([fed(source.window(int(i))) for i in batch if source.prefix_group[i] == n]) for n in inside
        }
        shortest, longest = min(prompts.values()), max(prompts.values())
        assert len(inside) * longest <= budget
        again = sum((prompts[n] - shortest) * int((numbers == n).sum()) for n in inside)
        assert again <= cost + PADDING_SHARE * longest * len(inside)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 64))
def test_passes_hold_every_window_once_with_little_padding(rest: list[int], most: int, cost: int) -> None:
    found = passes(rest, most, cost)
    assert sorted(i for part in found for i in part.tolist()) == list(range(len(rest)))
    for part in found:
        inside = [rest[i] for i in part.tolist()]
        assert len(inside) <= most
        assert len(inside) * max(inside) - sum(inside) <= cost + PADDING_SHARE * max(inside) * len(inside)


@pytest.mark.parametrize("given_tokens", [None, 40])
def test_scores_do_not_depend_on_the_groups_beside_them(tiny: Path, given_tokens: int | None) -> None:
    options = {"dtype": "float32"} | ({"batch_tokens": given_tokens} if given_tokens else {})
    engine = open_engine(choose(str(tiny), None, options), Work())
    source = groups_of([30, 31, 29, 12, 30, 2, 3], [3, 2, 4, 3, 1, 2, 2])
    together = dict(engine.score(source, np.zeros(len(source), np.bool_)))
    assert sorted(together) == list(range(len(source)))
    for index, window in enumerate(source.items):
        ((_, alone),) = engine.score(WindowList((window,)), np.zeros(1, np.bool_))
        assert together[index].logprob == pytest.approx(alone.logprob, abs=1e-4)
        assert np.array_equal(measured(together[index].rank), measured(alone.rank))
