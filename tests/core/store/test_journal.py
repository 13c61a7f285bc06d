"""The journal: complete records are read back, incomplete ones are scored again."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.disk.records import MAGIC, RecordFile
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import find_method
from scoremode.core.scores.journal import COLUMNS_ARE, Journal, header, inspect_journal
from scoremode.core.scores.schema import BUILT_IN, KL, ROUNDING
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, RunError
from tests.core.plan.test_recipes import tokens_of
from tests.partial_engine import SUBSETS, PartialEngine, named

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
    journal = Journal(path, IDENTITY, plan)
    for index, answers in engine.score(plan, journal.done.copy()):
        journal.add(index, answers, 0.5)
    assert [name for name, _ in journal.rows(0, plan.targets).columns()] == ["logprob", *engine.given]
    journal.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    "named_columns",
    [
        *(b"", b"{}", b"[", b'["rank"]', b'["logprob", "top"]', b'["rank", "logprob"]', b'["logprob", "logprob"]'),
        *(b'["logprob", "colour"]', b'["logprob", "rank", "entropy", "top", "top_logprob"]'),
    ],
)
def test_a_list_of_columns_that_no_engine_gives_is_refused(tmp_path: Path, named_columns: bytes) -> None:
    path = with_records(tmp_path / "j", (COLUMNS_ARE, named_columns))
    with pytest.raises(RunError, match=r"cannot be resumed: (its list of columns is damaged|logprob is|top and)"):
        Journal(path, IDENTITY, small_plan())


@pytest.mark.parametrize("first", [(0, None), (COLUMNS_ARE, b'["logprob"]')])
def test_the_list_of_columns_comes_first_and_once(tmp_path: Path, first: tuple[int, bytes | None]) -> None:
    plan = small_plan()
    number, body = first
    path = with_records(tmp_path / "j", (number, body or body_of(plan, 0)), (COLUMNS_ARE, b'["logprob"]'))
    with pytest.raises(RunError, match="cannot be resumed: it has window"):
        opened(path, plan)


def test_a_record_with_more_than_the_named_columns_is_refused(tmp_path: Path) -> None:
    plan = small_plan()
    path = with_records(tmp_path / "j", (COLUMNS_ARE, b'["logprob", "rank"]'), (0, body_of(plan, 0)))
    with pytest.raises(RunError, match="its record of window 0 has the wrong length"):
        opened(path, plan)


def test_scores_not_yet_there_are_nan_not_zero(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", small_plan(), 1)
    scores = journal.rows(0, journal.plan.targets)
    assert np.isnan(scores.logprob).sum() == journal.plan.targets - journal.plan.target_counts[0]


# ── what no engine gives ─────────────────────────────────────────────────────────────────────────────────────────────
POSSIBLE = {"logprob": -3.0, "rank": 4, "entropy": 2.0, "top": 7, "top_logprob": -1.0, "kl": 0.5}


def body_of(plan: Plan, window: int, seconds: float = 0.5, **changes: float) -> bytes:
    """A record whose first target has one value replaced."""
    packed = struct.pack("<d", seconds)
    for column in (*BUILT_IN.scores, KL):
        values = np.full(int(plan.target_counts[window]), POSSIBLE[column.name], column.numpy_type)
        values[0] = changes.get(column.name, POSSIBLE[column.name])
        packed += values.tobytes()
    return packed


def with_records(path: Path, *records: tuple[int, bytes]) -> Path:
    file = RecordFile(path, header(IDENTITY))
    for number, body in records:
        file.append(number, body)
    file.close()
    return path


def opened(path: Path, plan: Plan) -> Journal:
    return Journal(path, IDENTITY, plan, with_kl=True, vocabulary=1000)


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
def test_what_an_engine_may_give_is_resumed(tmp_path: Path, changes: dict[str, float]) -> None:
    plan = small_plan()
    assert opened(with_records(tmp_path / "j", (0, body_of(plan, 0, **changes))), plan).done[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprob": 5.0}, "logprob is 5"),
        ({"logprob": 2e-4}, "logprob is 0.0002"),
        ({"logprob": np.nan}, "logprob is nan"),
        ({"logprob": np.inf}, "logprob is inf"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": 1001}, "rank is 1001"),
        ({"entropy": np.nan}, "entropy is nan"),
        ({"entropy": -0.1}, "entropy is -0.1"),
        ({"entropy": np.inf}, "entropy is inf"),
        ({"entropy": 1e300}, r"entropy is 1e\+300"),
        ({"entropy": 7.0}, "entropy is 7"),  # ln 1000 = 6.9
        ({"entropy": 0.5}, "entropy is 0.5, and top logprob -1"),
        ({"top_logprob": -4.0}, "top logprob is -4, below the logprob -3 of a token"),
        ({"top": -1}, "top is -1"),
        ({"top": 1000}, "top is 1000"),
        ({"top_logprob": 0.5}, "top logprob is 0.5"),
        ({"top_logprob": -np.inf}, "top logprob is -inf"),
        ({"kl": -1e-9}, "kl is -1e-09"),
        ({"kl": np.nan}, "kl is nan"),
        ({"seconds": np.nan}, "impossible time"),
        ({"seconds": -1.0}, "impossible time"),
    ],
)
def test_impossible_content_under_a_right_checksum_is_refused(
    tmp_path: Path, changes: dict[str, float], said: str
) -> None:
    plan = small_plan()
    path = with_records(tmp_path / "j", (0, body_of(plan, 0, **changes)))
    before = path.read_bytes()
    with pytest.raises(RunError, match=said) as caught:
        opened(path, plan)
    assert "--fresh" in caught.value.fix
    assert path.read_bytes() == before, "what is refused is not thrown away"


def test_windows_that_cannot_be_there_are_refused(tmp_path: Path) -> None:
    plan = small_plan()
    body = body_of(plan, 0)
    cases = {
        "window 0 twice": [(0, body), (0, body)],
        "wrong length": [(0, body[:-8])],
        "does not have": [(0, b"")],
        f"window {len(plan)} of {len(plan)}": [(len(plan), body)],
    }
    for number, (said, records) in enumerate(cases.items()):
        with pytest.raises(RunError, match=said):
            opened(with_records(tmp_path / str(number), *records), plan)


def test_a_window_may_be_scored_again_once_it_was_taken_back(tmp_path: Path) -> None:
    plan = small_plan()
    path = with_records(tmp_path / "j", (0, body_of(plan, 0)), (0, b""), (0, body_of(plan, 0, logprob=-9.0)))
    journal = opened(path, plan)
    n = int(plan.target_counts[0])
    assert journal.rows(0, n).logprob.tolist() == [-9.0, *[-3.0] * (n - 1)]
    journal.forget(0)
    assert not journal.done[0]
    assert np.isnan(journal.rows(0, n).logprob).all()
    journal.close()
    assert not opened(path, plan).done.any()


def test_a_record_under_another_windows_number_is_not_believed(tmp_path: Path) -> None:
    """Windows of equal length: the checksum covers the number, so one flipped bit invalidates the record."""
    plan = small_plan()
    filled(tmp_path / "j", plan, 3).close()
    data = bytearray((tmp_path / "j").read_bytes())
    last = data.rindex(MAGIC)
    assert int.from_bytes(data[last + 4 : last + 12], "little") == 2
    data[last + 4] ^= 1
    (tmp_path / "j").write_bytes(bytes(data))
    assert Journal(tmp_path / "j", IDENTITY, plan).done.tolist()[:4] == [True, True, False, False]


def test_an_engine_that_answers_twice_or_with_the_impossible_is_found_out(tmp_path: Path) -> None:
    plan = small_plan()
    journal = filled(tmp_path / "j", plan, 1)
    given = dict(TableEngine(np.zeros((1, 1000))).score(plan, np.zeros(len(plan), np.bool_)))
    with pytest.raises(EngineError, match="twice"):
        journal.add(0, given[0], 0.5)
    with pytest.raises(EngineError, match="logprob is 5"):
        journal.add(1, replace(given[1], logprob=given[1].logprob * 0 + 5), 0.5)
    assert journal.done.tolist()[:2] == [True, False]


def test_the_identity_can_be_read_without_the_plan(tmp_path: Path) -> None:
    filled(tmp_path / "j", small_plan(), 1).close()
    assert inspect_journal(tmp_path / "j").identity == IDENTITY
    (tmp_path / "torn").write_bytes(b'{"model": "m"')
    assert inspect_journal(tmp_path / "torn").identity is None
