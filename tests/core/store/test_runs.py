"""Run folders: complete or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.disk.records import RecordFile, first_line
from scoremode.core.scores.journal import HEADER
from scoremode.core.store.runs import JOURNAL, MANIFEST
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import ModelError, OptionError, RunError

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


def make(folder: Path, text: str = TEXT, **more: object) -> sm.Run:
    return sm.ppl("table:uniform", text=text, context_length=32, stride=16, out=folder, **more)  # type: ignore[arg-type]


def test_a_saved_run_loads_to_the_same_numbers_and_columns(tmp_path: Path) -> None:
    made = make(tmp_path / "run")
    loaded = sm.load(tmp_path / "run")
    assert loaded.perplexity == made.perplexity
    assert loaded.summary()["plan_digest"] == made.plan_digest
    for name, column in made.scores.columns():
        assert np.array_equal(column, getattr(loaded.scores, name))
    assert loaded.to_arrow().equals(made.to_arrow())
    assert not (tmp_path / "run" / JOURNAL).exists()


def test_an_unfinished_run_is_not_taken_for_whole(tmp_path: Path) -> None:
    identity = {"model": "m", "plan": "p", "engine": "e"}
    records = RecordFile(tmp_path / JOURNAL, {**HEADER, "identity": identity})
    records.append(0, b"something scored")
    records.close()
    with pytest.raises(RunError, match="unfinished"):
        sm.load(tmp_path)
    with pytest.raises(RunError, match="another run"):
        make(tmp_path)


def test_a_journal_without_scores_does_not_block_another_run(tmp_path: Path) -> None:
    """A kill while the engine loads must not reserve the folder for that run."""
    (tmp_path / JOURNAL).write_bytes(first_line({**HEADER, "identity": {"model": "m"}}))
    assert not make(tmp_path).cached


def test_a_journal_of_the_format_before_is_refused_and_fresh_replaces_it(tmp_path: Path) -> None:
    identity = make(tmp_path / "run").manifest["identity"]
    records = RecordFile(tmp_path / JOURNAL, {"format": 2, "identity": identity})
    records.append(0, b"something scored")
    records.close()
    with pytest.raises(RunError, match="another version of scoremode") as caught:
        make(tmp_path)
    assert "--fresh" in caught.value.fix
    assert not make(tmp_path, fresh=True).cached


@pytest.mark.parametrize(
    "first", [b"[" * 100_000 + b"\n", b"\xff\xfe\n", b"{}\n", b"null\n", b'{"format": 2, "identity": 5}\n', b'{"a": 1']
)
def test_a_journal_whose_first_line_is_damaged_stays(tmp_path: Path, first: bytes) -> None:
    """It may be somebody's own file in which these letters occur."""
    (tmp_path / JOURNAL).write_bytes(first + b"scm2" + bytes(60))
    for fresh in (False, True):
        with pytest.raises(RunError, match="did not make, or which is damaged; remove that file"):
            make(tmp_path, fresh=fresh)
    assert (tmp_path / JOURNAL).read_bytes() == first + b"scm2" + bytes(60)


def test_a_folder_under_a_journals_name_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).mkdir()
    for fresh in (False, True):
        with pytest.raises(RunError, match="not a run"):
            make(tmp_path, fresh=fresh)


def test_columns_without_a_manifest_are_replaced_by_fresh_alone(tmp_path: Path) -> None:
    """What an older --fresh left when it was killed; a foreign Parquet file is not mistaken for it."""
    make(tmp_path / "run")
    (tmp_path / "run" / MANIFEST).unlink()
    with pytest.raises(RunError, match="without its manifest"):
        make(tmp_path / "run")
    assert not make(tmp_path / "run", fresh=True).cached


def test_a_fresh_run_that_cannot_be_scored_leaves_the_old_one(tmp_path: Path) -> None:
    before = make(tmp_path / "run").perplexity
    with pytest.raises(OptionError):
        make(tmp_path / "run", fresh=True, dtype="float32")
    with pytest.raises(ModelError):  # detected when the engine is open
        sm.ppl("table:uniform", text=TEXT, engine=TableEngine(np.zeros((1, 9))), out=tmp_path / "run", fresh=True)
    assert sm.load(tmp_path / "run").perplexity == before


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "half \ud800 of a pair"])
def test_a_folder_that_cannot_exist_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError) as caught:
        make(tmp_path / name)
    assert caught.value.fix


def test_a_run_in_format_1_is_refused_and_fresh_replaces_it(tmp_path: Path) -> None:
    make(tmp_path / "run")
    path = tmp_path / "run" / MANIFEST
    manifest = {**json.loads(path.read_text()), "format": 1}
    del manifest["seal"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="format 1, this scoremode reads 2; score again"):
        sm.load(tmp_path / "run")
    assert not make(tmp_path / "run", fresh=True).cached
