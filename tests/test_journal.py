"""The journal: what was written whole comes back, what was torn is scored again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.engines.table import TableEngine
from scoremode.errors import RunError
from scoremode.journal import Journal, read_identity
from scoremode.methods import find_method, make_plan
from scoremode.types import Plan
from tests.test_methods import tokens_of

IDENTITY: dict[str, Any] = {"model": "m", "plan": "p"}


def small_plan() -> Plan:
    return make_plan(find_method("sliding-once"), tokens_of(12, 9), context_length=6, stride=3)


def filled(path: Path, plan: Plan, windows: int) -> Journal:
    journal = Journal(path, IDENTITY, plan)
    engine = TableEngine(np.random.default_rng(0).normal(size=(1, 1000)))
    for index, answers in engine.score(plan, journal.done.copy()):
        if index < windows:
            journal.add(index, answers, 0.5)
    return journal


def test_what_was_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    plan = small_plan()
    first = filled(tmp_path / "j", plan, len(plan))
    written = first.rows(0, plan.targets)
    first.close()
    again = Journal(tmp_path / "j", IDENTITY, plan)
    assert again.done.all()
    assert again.seconds == 0.5 * len(plan)
    read = again.rows(0, plan.targets)
    for name, column in written.columns():
        assert np.array_equal(column, getattr(read, name)), name


@pytest.mark.parametrize("cut", [1, 7, 20, 60])
def test_a_torn_tail_is_cut_off_and_only_it(tmp_path: Path, cut: int) -> None:
    plan = small_plan()
    filled(tmp_path / "j", plan, 3).close()
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data[:-cut])
    journal = Journal(tmp_path / "j", IDENTITY, plan)
    assert journal.done.tolist()[:3] == [True, True, False]
    journal.close()
    filled(tmp_path / "j", plan, len(plan)).close()
    assert Journal(tmp_path / "j", IDENTITY, plan).done.all()


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    plan = small_plan()
    filled(tmp_path / "j", plan, 2).close()
    data = bytearray((tmp_path / "j").read_bytes())
    data[-5] ^= 1
    (tmp_path / "j").write_bytes(bytes(data))
    assert Journal(tmp_path / "j", IDENTITY, plan).done.tolist()[:2] == [True, False]


def test_scores_not_yet_there_are_nan_not_zero(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", small_plan(), 1)
    scores = journal.rows(0, journal.plan.targets)
    assert np.isnan(scores.logprob).sum() == journal.plan.targets - journal.plan.target_counts[0]


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", small_plan(), 1)
    with pytest.raises(RunError, match="another process"):
        Journal(tmp_path / "j", IDENTITY, small_plan())
    journal.close()


def test_the_identity_can_be_read_without_the_plan(tmp_path: Path) -> None:
    filled(tmp_path / "j", small_plan(), 1).close()
    assert read_identity(tmp_path / "j") == IDENTITY
    (tmp_path / "torn").write_bytes(b'{"model": "m"')
    assert read_identity(tmp_path / "torn") is None
