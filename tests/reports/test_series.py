"""The page is made from columns that are read block by block: whatever the block, it is the same page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from scoremode.core.statistics import parts, streams
from scoremode.core.store.run import Run
from scoremode.core.store.runs import load
from scoremode.core.verbs.ppl import ppl
from scoremode.reports.html import scored_text
from scoremode.reports.html.page import render
from scoremode.reports.html.scored_text import distinct_tokens, reading_order, taken
from scoremode.values import Ints
from tests.core.verbs.test_memory import in_blocks_of
from tests.memory import measured_alone, peak_of
from tests.reports.demo import make_baseline, make_demo, write


def with_tokens(token: Ints) -> Run:
    run = make_baseline(len(token))
    return dataclasses.replace(run, facts=dataclasses.replace(run.facts, token=token))


def written(page: Path, run: Run) -> None:
    write(page, render([], runs=[run], text_targets=500))


def test_the_page_does_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = make_demo(700)
    pages: list[Callable[[], str]] = [
        lambda: render(comparisons, text_targets=100),
        lambda: render([], runs=[comparisons[0].baseline]),
    ]
    at_once = [page() for page in pages]
    in_blocks_of(13, monkeypatch)
    monkeypatch.setattr(parts, "SUMS", 1)  # a pass for each point of a curve
    assert [page() for page in pages] == at_once


@pytest.mark.parametrize("limit", [1, 10, 500])
def test_the_order_of_reading_is_that_of_the_whole_column(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks_of(13, monkeypatch)
    run = with_tokens(np.random.default_rng(1).integers(0, 90, 200))
    expected = np.unique(run.facts.token, return_index=True)[1][:limit]
    assert reading_order(run, limit).tolist() == expected.tolist()
    for name in ("token", "text"):
        (found,) = taken(run.facts, [name], expected)
        assert found.tolist() == getattr(run.facts, name)[expected].tolist()


@pytest.mark.parametrize("most", [0, scored_text.MOST_BETWEEN])
@pytest.mark.parametrize("token", [np.arange(50), np.arange(50) // 2 + 7, np.arange(50)[::-1] * 3])
def test_distinct_tokens_are_counted(token: Ints, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks_of(13, monkeypatch)
    monkeypatch.setattr(scored_text, "MOST_BETWEEN", most)
    assert distinct_tokens(with_tokens(token)) == len(set(token.tolist()))


FEW, MANY = 4000, 24_000


def peaks(folder: str) -> list[int]:
    """Of writing the page of a run with few targets, and with many."""
    patch = pytest.MonkeyPatch()
    in_blocks_of(512, patch)
    patch.setattr(streams, "MOST", 1000)
    found = []
    for targets in (1000, FEW, MANY):  # what is loaded on first use is not counted
        out, page = Path(folder) / str(targets), Path(folder) / f"{targets}.html"
        ppl("table:uniform", text="some text " * (targets // 10), context_length=256, stride=256, out=out)
        found.append(peak_of(partial(written, page, load(out))))
    return found[1:]


def test_a_target_more_takes_hardly_more_memory(tmp_path: Path) -> None:
    """The columns alone would take 100 bytes for each."""
    few, many = measured_alone(peaks, str(tmp_path))
    assert (many - few) / (MANY - FEW) < 10
