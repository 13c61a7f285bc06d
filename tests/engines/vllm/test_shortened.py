"""Shortened windows for the noise floor: which rows are certainly computed in a different step. Needs no vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from scoremode.core.scores.answers import Window, WindowList
from scoremode.engines.vllm.engine import ShortenedWindows


def window(tokens: int, first: int = 0) -> Window:
    ids = np.arange(tokens, dtype=np.int32)
    return Window(ids, np.arange(first, tokens - 1, dtype=np.int32), ids[first + 1 :, None])


@pytest.mark.parametrize(("tokens", "first"), [(48, 0), (48, 23), (2048, 0), (2048, 1535), (300, 200)])
@pytest.mark.parametrize("step", [64, 512, 2048, 8192])
def test_rows_of_the_last_step_are_counted_and_it_is_shorter_than_any_usual_one(
    tokens: int, first: int, step: int
) -> None:
    shortened = ShortenedWindows(WindowList((window(tokens, first),)), step)
    short, counted = shortened.window(0), shortened.rows_in_other_steps(0)
    last = len(short.ids) - (len(short.ids) - 1) // step * step  # tokens of the last step, alone in flight
    assert 0 < last < min(step, tokens)
    assert counted.any()
    rows = short.rows[counted]
    assert rows.min() >= len(short.ids) - last
    assert rows.max() < len(short.ids) < tokens
    assert np.array_equal(short.ids, np.arange(len(short.ids)))
    assert np.array_equal(short.targets[:, 0], short.rows + 1)
    assert shortened.lengths.tolist() == [len(short.ids)]


@pytest.mark.parametrize("item", [window(2), window(9), window(48, 40), window(400, 380)])
def test_what_is_too_short_to_be_cut_is_not_counted(item: Window) -> None:
    """A step with only a few tokens less might be padded to the same size."""
    assert not ShortenedWindows(WindowList((item,)), 512).rows_in_other_steps(0).any()
