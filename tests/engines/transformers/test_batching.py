"""Batches: each window once, little padding, and the same batches whatever is already done."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core.engine.batching import PADDING_SHARE, batches_by_length
from scoremode.core.scores.answers import Window, WindowList
from scoremode.values import Ints


def source(lengths: list[int], groups: Ints | None = None) -> WindowList:
    nothing = np.zeros((0, 1), np.int32)
    windows = tuple(Window(np.zeros(n, np.int32), np.zeros(0, np.int32), nothing) for n in lengths)
    return WindowList(windows, groups)


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 2000))
def test_every_window_once_within_the_budget_and_the_padding(lengths: list[int], budget: int) -> None:
    batches = batches_by_length(source(lengths), budget)
    assert sorted(i for b in batches for i in b.tolist()) == list(range(len(lengths)))
    for batch in batches:
        inside = [lengths[i] for i in batch.tolist()]
        assert len(batch) == 1 or len(batch) * max(inside) <= budget
        assert sum(inside) >= (1 - PADDING_SHARE) * len(inside) * max(inside) - 1e-9


def test_equal_windows_keep_their_order_and_those_that_share_a_prompt_stay_together() -> None:
    assert [b.tolist() for b in batches_by_length(source([8] * 5), 16)] == [[0, 1], [2, 3], [4]]
    batches = batches_by_length(source([5, 9, 6, 9, 7], np.array([0, 1, 0, 2, 0])), 100)
    assert [b.tolist() for b in batches] == [[0, 2, 4], [1, 3]]
