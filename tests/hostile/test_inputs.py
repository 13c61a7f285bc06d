"""Every bad input of the table is answered with one line, the right exit code, and nothing lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from scoremode.cli.commands import COMMANDS
from tests.hostile import harness
from tests.hostile.cases import Case, all_cases
from tests.hostile.harness import Outcome, problems
from tests.hostile.inputs import Stock

CASES = all_cases()
NO_STOCK: Any = None  # for cases that name nothing of it


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return Stock.make(tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bad_input_is_answered_with_one_line(case: Case, stock: Stock, tmp_path: Path) -> None:
    assert problems(case, tmp_path / "case", stock) == []


def test_the_table_is_large_and_leaves_no_command_out() -> None:
    assert len(CASES) == len(set(CASES))
    assert len(CASES) >= 200
    named = {case.command.split(" ")[0] for case in CASES}
    assert [verb for verb in COMMANDS if verb not in named] == []


@pytest.mark.parametrize(
    ("code", "err", "wrong"),
    [
        (2, "scoremode: no good; give another\n", []),
        (0, "", ["exit code", "does not say"]),
        (70, "scoremode: this is a bug in scoremode (KeyError: 1)\n", ["exit code", "a traceback, or a bug"]),
        (1, "Traceback (most recent call last):\nKeyError: 1\n", ["exit code", "a traceback", "2 lines", "no line"]),
        (2, "note: something\nscoremode: no good\n", ["2 lines"]),
        (2, "", ["0 lines", "no line", "does not say"]),
        (2, "scoremode: no\x1b[2J good\n", ["control characters", "does not say"]),
        (2, "scoremode: wrong\n", ["does not say"]),
        (2, "scoremode: the-folder/no good\n", []),
    ],
)
def test_wrong_answers_are_seen(
    code: int, err: str, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "run", lambda *_: Outcome(code, "", err))
    found = problems(Case("planted", "report {good.txt}", ("no good",)), tmp_path / "case", NO_STOCK)
    assert all(any(problem.startswith(start) for problem in found) for start in wrong), found
    assert bool(found) == bool(wrong)


def test_a_command_that_hangs_or_takes_long_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "HANGS", 0.2)
    monkeypatch.setattr(harness, "main", lambda _: time.sleep(20))
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    assert problems(Case("planted", "report", ()), tmp_path / "a", NO_STOCK) == ["did not end within 0 s"]
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (before > 0), "the limit of the test itself is gone"
    monkeypatch.setattr(harness, "PROGRAM", ["sleep"])
    assert problems(Case("planted", "20", (), process=True), tmp_path / "b", NO_STOCK) == ["did not end within 0 s"]
    monkeypatch.setattr(harness, "run", lambda *_: Outcome(2, "", "scoremode: no good\n", seconds=11.0))
    (problem,) = problems(Case("planted", "report", ()), tmp_path / "c", NO_STOCK)
    assert problem.startswith("took 11 s")


def test_a_word_in_the_path_of_an_input_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "run", lambda _, words: Outcome(2, "", f"scoremode: {words[1]} is wrong\n"))
    assert problems(Case("planted", "report {empty.txt}", ("empty",)), tmp_path / "a", NO_STOCK) != []
    assert problems(Case("planted", "report {empty.txt}", ("empty.txt",)), tmp_path / "b", NO_STOCK) == []


def test_a_lost_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def destroy(_case: Case, words: list[str]) -> Outcome:
        Path(words[1]).write_text("gone")
        Path(words[2]).unlink()
        return Outcome(2, "", "scoremode: no good\n")

    monkeypatch.setattr(harness, "run", destroy)
    found = problems(Case("planted", "report {good.txt} {pairs.jsonl}", ()), tmp_path / "case", NO_STOCK)
    assert found == ["good.txt was changed", "pairs.jsonl was removed"]
