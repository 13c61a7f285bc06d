"""A few of the kills of benchmarks/hostile.py: each verb, killed at random moments, ends in the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.hostile import kills
from tests.hostile.kills import Assault, Job, Started, results_of, table_jobs

# bytes of text: a second of scoring each, and comparing takes three times as long
VERBS = {"ppl": 40_000, "prob": 40_000, "rollouts": 40_000, "reference": 40_000, "compare": 15_000}
KILLS = 4


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_command_killed_at_random_moments_ends_in_the_same_numbers(verb: str, tmp_path: Path) -> None:
    (job,) = [job for job in table_jobs(tmp_path / "inputs", VERBS[verb]) if job.name.startswith(verb)]
    figures = Assault(job, tmp_path / "rounds").run(KILLS, seconds=300)
    print(figures)
    assert figures.clean, figures.complaints
    assert figures.kills == KILLS, "the machine was too slow for so many"
    assert figures.while_scoring, "no kill left anything to resume"


ORPHAN = "import subprocess, time; subprocess.Popen(['/bin/sleep', '60']); time.sleep(1)"


def test_an_orphan_is_seen_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "PROGRAM", [sys.executable, "-c", ORPHAN])
    monkeypatch.setattr(kills, "PATIENCE", 0.5)
    started = Started([], tmp_path / "stderr.txt")
    code, said, left = started.end()
    assert (code, said, left) == (0, "", 1)
    assert [pid for pid in started.family if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []


def test_other_numbers_a_traceback_and_a_wrong_exit_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that never writes the same number twice, and ends badly."""
    program = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(time.time())); raise SystemExit({})"
    monkeypatch.setattr(kills, "PROGRAM", [sys.executable, "-c", program.format("'Traceback'")])
    assault = Assault(Job("prob", lambda out: [str(out)]), tmp_path / "rounds")
    assert results_of(tmp_path / "rounds" / "round1" / "results.jsonl") != {}
    assault._round(0)
    figures = assault.figures
    assert (figures.wrong_numbers, figures.wrong_exits, figures.tracebacks) == (1, 2, 2)
    assert not figures.clean
