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
from scoremode.core.scores.journal import COLUMNS_ARE, SECONDS, Journal
from scoremode.core.scores.schema import BUILT_IN, KL, ROUNDING
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, RunError
from tests.core.plan.test_recipes import tokens_of
from tests.partial_engine import SUBSETS, PartialEngine, named

IDENTITY: dict[str, Any] = {"model": "m", "plan": "p"}


def small_plan() -> Plan:
    return make_plan(find_method("sliding-once"), tokens_of(12, 9), context_length=6, stride=3)


def filled(path: Path, plan: Plan, windows: int) -> Journal:
    journal = Journal(path, IDENTITY, plan.target_counts)
    engine = TableEngine(np.random.default_rng(0).normal(size=(1, 1000)))
    for index, answers in engine.score(plan, journal.done.copy()):
        if index < windows:
            journal.add(index, answers, 0.5)
    return journal


def test_what_was_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    plan = small_plan()
    first = filled(tmp_path / "j", plan, len(plan))
    written = first.scores
    first.close()
    again = Journal(tmp_path / "j", IDENTITY, plan.target_counts)
    assert again.done.all()
    assert again.seconds == 0.5 * len(plan)
    read = again.scores
    for name, column in written.columns():
        assert np.array_equal(column, getattr(read, name)), name


def forged_bodies(plan: Plan) -> dict[str, tuple[int, bytes]]:
    """Records with right checksums that nobody but a forger writes: number and body."""
    count = int(plan.target_counts[1])
    nan = SECONDS.pack(1.0) + np.full(count, np.nan).tobytes() + np.ones(count, "<i8").tobytes()
    return {
        "a window that the plan does not have": (len(plan), nan),
        "another length": (1, nan[:-1]),
        "NaN": (1, nan),
        "columns that do not go together": (COLUMNS_ARE, b'["rank"]'),
        "no list of columns": (COLUMNS_ARE, b"1"),
    }


@pytest.mark.parametrize("name", forged_bodies(small_plan()))
def test_a_forged_record_is_refused(tmp_path: Path, name: str) -> None:
    plan, path = small_plan(), tmp_path / "j"
    journal = Journal(path, IDENTITY, plan.target_counts)
    count = int(plan.target_counts[0])
    journal.add(0, Answers(np.full((count, 1), -1.0), rank=np.ones((count, 1), np.int64)), 1.0)
    journal._file.append(*forged_bodies(plan)[name])
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


def test_scores_not_yet_there_are_nan_not_zero(tmp_path: Path) -> None:
    plan = small_plan()
    scores = filled(tmp_path / "j", plan, 1).scores
    assert np.isnan(scores.logprob).sum() == plan.targets - plan.target_counts[0]


# ── what no engine gives ─────────────────────────────────────────────────────────────────────────────────────────────
POSSIBLE = {"logprob": -3.0, "rank": 4, "entropy": 2.0, "top": 7, "top_logprob": -1.0, "kl": 0.5}


def answers_with(plan: Plan, **changes: float) -> Answers:
    """Answers to the first window, whose first target has one value replaced."""
    columns = {}
    for column in (*BUILT_IN.scores, KL):
        values = np.full(int(plan.target_counts[0]), POSSIBLE[column.name], column.numpy_type)
        values[0] = changes.get(column.name, POSSIBLE[column.name])
        columns[column.name] = values[:, None] if column.per == "target" else values
    return Answers(**columns)


def opened(path: Path, plan: Plan) -> Journal:
    return Journal(path, IDENTITY, plan.target_counts, with_kl=True, vocabulary=1000)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprob": -np.inf},
        {"kl": np.inf},
        {"logprob": ROUNDING, "top_logprob": 0.0},
        {"rank": 1000},
        {"entropy": np.log(1000)},
        {"logprob": -1.0 + 1e-3},
        {"entropy": 1.0 - 1e-3},
    ],
)
def test_what_an_engine_may_give_is_kept(tmp_path: Path, changes: dict[str, float]) -> None:
    plan = small_plan()
    opened(tmp_path / "j", plan).add(0, answers_with(plan, **changes), 0.5)
    assert opened(tmp_path / "j", plan).done[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprob": 5.0}, "logprob is 5"),
        ({"logprob": 2e-4}, "logprob is 0.0002"),
        ({"logprob": np.nan}, "logprob is nan"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": 1001}, "rank is 1001"),
        ({"entropy": np.nan}, "entropy is nan"),
        ({"entropy": -0.1}, "entropy is -0.1"),
        ({"entropy": 7.0}, "entropy is 7"),  # ln 1000 = 6.9
        ({"entropy": 0.5}, "entropy is 0.5, and top logprob -1"),
        ({"top_logprob": -4.0}, "top logprob is -4, below the logprob -3 of a token"),
        ({"top": -1}, "top is -1"),
        ({"top": 1000}, "top is 1000"),
        ({"top_logprob": -np.inf}, "top logprob is -inf"),
        ({"kl": -1e-9}, "kl is -1e-09"),
        ({"kl": np.nan}, "kl is nan"),
    ],
)
def test_what_no_model_can_give_is_not_kept(tmp_path: Path, changes: dict[str, float], said: str) -> None:
    plan = small_plan()
    with pytest.raises(EngineError, match=said):
        opened(tmp_path / "j", plan).add(0, answers_with(plan, **changes), 0.5)
    assert not opened(tmp_path / "j", plan).done.any()


def test_a_window_may_be_scored_again_once_it_was_taken_back(tmp_path: Path) -> None:
    plan = small_plan()
    journal, n = opened(tmp_path / "j", plan), int(plan.target_counts[0])
    journal.add(0, answers_with(plan), 0.5)
    journal.forget(0)
    assert not opened(tmp_path / "j", plan).done.any()
    assert np.isnan(journal.scores.logprob[:n]).all()
    journal.add(0, answers_with(plan, logprob=-9.0), 0.5)
    assert opened(tmp_path / "j", plan).scores.logprob[:n].tolist() == [-9.0, *[-3.0] * (n - 1)]
