"""Columns on disk: read on demand, in blocks of one size, whatever the row groups of the file."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.core.scores.parquet import ColumnFile
from scoremode.errors import RunError

TEXT = "Thé quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def run(tmp_path: Path) -> sm.Run:
    return sm.ppl("table:uniform", text=TEXT, context_length=32, stride=16, out=tmp_path / "run")


def test_a_column_is_read_once_and_only_when_asked_for(run: sm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = ColumnFile.read

    def counting(self: ColumnFile, name: str) -> object:
        asked.append(name)
        return read(self, name)

    monkeypatch.setattr(ColumnFile, "read", counting)
    assert len(run.scores) == len(TEXT.encode()) - 1
    assert asked == []
    assert run.scores.logprob is run.scores.logprob
    assert run.facts.text[0] == "h"
    assert asked == ["logprob", "text"]
    with pytest.raises(AttributeError, match="no column 'nothing'"):
        _ = run.scores.nothing  # type: ignore[attr-defined]


def test_a_run_outlives_its_folder(run: sm.Run, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run")
    assert "".join(run.facts.text[3:9]) == TEXT[3:9]
    assert (measured(run.scores.rank) >= 1).all()


@pytest.mark.parametrize("row_group", [7, 10_000])
def test_columns_are_the_same_whatever_the_row_groups(run: sm.Run, tmp_path: Path, row_group: int) -> None:
    pq.write_table(run.to_arrow(), tmp_path / "again.parquet", row_group_size=row_group)
    again = ColumnFile(tmp_path / "again.parquet")
    assert np.array_equal(measured(again.read("logprob")), run.scores.logprob)
    assert np.array_equal(measured(again.read("text")), run.facts.text)


def test_stored_columns_can_be_copied_and_sent(run: sm.Run) -> None:
    for copy in (replace(run.scores), pickle.loads(pickle.dumps(run.scores))):
        assert [name for name, c in copy.columns() if not np.array_equal(c, getattr(run.scores, name))] == []
    changed = replace(run.scores, logprob=np.zeros(len(run.scores)))
    assert (changed.logprob == 0).all()
    assert np.array_equal(measured(changed.rank), measured(run.scores.rank))


def test_a_file_without_a_column_is_refused(run: sm.Run, tmp_path: Path) -> None:
    pq.write_table(run.to_arrow().drop_columns(["entropy"]), tmp_path / "less.parquet")
    with pytest.raises(RunError, match="no column entropy"):
        ColumnFile(tmp_path / "less.parquet")
    (tmp_path / "other.parquet").write_bytes(b"not a table")
    with pytest.raises(RunError, match="cannot be read"):
        ColumnFile(tmp_path / "other.parquet")
