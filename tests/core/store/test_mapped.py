"""Long columns lie in a file, and are the same arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scoremode.core.scores import parquet as columns
from scoremode.core.statistics.comparison import comparison_statistics
from scoremode.core.store import runs
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.ppl import ppl
from scoremode.studies.kld.statistics import llamacpp_statistics
from scoremode.values import mapped_column, release_pages

TEXT = "Thé quick brown fox jumps over the lazy dog. " * 30


def test_a_mapped_column_has_the_values_and_keeps_them_when_its_pages_go() -> None:
    values = np.arange(100_000) * 0.5
    found = mapped_column((values[i : i + 999] for i in range(0, len(values), 999)), len(values))
    assert type(found) is np.ndarray
    release_pages(found)
    assert np.array_equal(found, values)
    release_pages(values)
    assert values[-1] == 49_999.5, "an array in memory stays"
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1.0


def test_long_columns_give_the_statistics_of_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> tuple[object, object]:
        (found,) = compare("table:uniform", "table:uniform", text=TEXT, out=tmp_path / "c")
        assert found.kl is not None
        return comparison_statistics(found), llamacpp_statistics(found)

    in_memory = both()
    monkeypatch.setattr(columns, "LONG", 1)
    assert both() == in_memory


def test_no_room_for_the_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppl("table:uniform", text=TEXT, out=tmp_path / "r")
    expected = runs.load(tmp_path / "r").scores.logprob

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(columns, "LONG", 1)
    monkeypatch.setattr(columns, "mapped_column", full)
    assert np.array_equal(runs.load(tmp_path / "r").scores.logprob, expected)


def test_single_values_are_those_of_the_column(tmp_path: Path) -> None:
    run = ppl("table:uniform", text=TEXT, out=tmp_path / "r")
    stored = runs.load(tmp_path / "r")
    for row in (0, 1, len(run.scores) - 1):
        assert stored.facts.value("text", row) == run.facts.text[row]
        assert stored.scores.value("logprob", row) == run.scores.logprob[row]
