"""The journal: complete records are read back, incomplete ones are scored again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import find_method
from scoremode.core.scores.answers import Answers
from scoremode.core.scores.journal import Journal
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import RunError
from tests.core.plan.streams import tokens_of
from tests.partial_engine import SUBSETS, PartialEngine, named

IDENTITY: dict[str, Any] = {"model": "m", "plan": "p"}


def small_plan() -> Plan:
    return make_plan(find_method("sliding-once"), tokens_of(12, 9), context_length=6, stride=3)


def filled(path: Path, plan: Plan) -> Journal:
    journal = Journal(path, IDENTITY, plan.target_counts)
    engine = TableEngine(np.random.default_rng(0).normal(size=(1, 1000)))
    for index, answers in engine.score(plan, journal.done.copy()):
        journal.add(index, answers, 0.5)
    return journal


def test_what_was_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    plan = small_plan()
    first = filled(tmp_path / "j", plan)
    written = first.scores
    first.close()
    again = Journal(tmp_path / "j", IDENTITY, plan.target_counts)
    assert again.done.all()
    assert again.seconds == 0.5 * len(plan)
    read = again.scores
    for name, column in written.columns():
        assert np.array_equal(column, getattr(read, name)), name


@pytest.mark.parametrize("body", [b"", b"12345678 more"])
def test_a_record_of_another_run_is_refused(tmp_path: Path, body: bytes) -> None:
    plan, path = small_plan(), tmp_path / "j"
    journal = Journal(path, IDENTITY, plan.target_counts)
    journal.add(0, Answers(np.full((int(plan.target_counts[0]), 1), -1.0)), 1.0)
    journal._file.append(0 if body else len(plan), body)
    journal.close()
    with pytest.raises(RunError, match="cannot be resumed"):
        Journal(path, IDENTITY, plan.target_counts)


# ── journals without some columns ────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("columns", SUBSETS, ids=named)
def test_a_journal_that_was_cut_anywhere_resumes_with_the_columns_that_it_had(
    tmp_path: Path, columns: tuple[str, ...]
) -> None:
    plan = small_plan()
    whole = filled_by(tmp_path / "whole", plan, PartialEngine(*columns))
    begins = whole.index(b"\n") + 1
    for cut in range(begins, len(whole), 7):
        (tmp_path / "j").write_bytes(whole[:cut])
        assert filled_by(tmp_path / "j", plan, PartialEngine(*columns)) == whole


def filled_by(path: Path, plan: Plan, engine: PartialEngine) -> bytes:
    """The journal's bytes after all missing windows are scored."""
    journal = Journal(path, IDENTITY, plan.target_counts)
    for index, answers in engine.score(plan, journal.done.copy()):
        journal.add(index, answers, 0.5)
    assert [name for name, _ in journal.scores.columns()] == ["logprob", *engine.given]
    journal.close()
    return path.read_bytes()


def test_a_window_may_be_scored_again_once_it_was_taken_back(tmp_path: Path) -> None:
    plan = small_plan()
    journal, n = filled(tmp_path / "j", plan), int(plan.target_counts[0])
    journal.forget(0)
    assert np.flatnonzero(~Journal(tmp_path / "j", IDENTITY, plan.target_counts).done).tolist() == [0]
    again = {name: column[:n] for name, column in filled(tmp_path / "other", plan).scores.columns()}
    again |= {"logprob": np.full((n, 1), -9.0), "rank": again["rank"][:, None]}
    journal.add(0, Answers(**again), 0.5)
    assert Journal(tmp_path / "j", IDENTITY, plan.target_counts).scores.logprob[:n].tolist() == [-9.0] * n
