"""scoremode prob --out in real processes: several at once, killed at random moments, resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked

PAIRS = 640
CHUNK = 16  # smaller than usual, so that a kill finds many of them done
SLOWED = f"""
import os, time
from scoremode.core.verbs.prob import many_pairs, sequence
many_pairs.CHUNK = {CHUNK}
score = sequence.SequenceProbability.score
def slow(self, *given):
    found = score(self, *given)
    time.sleep(float(os.environ["SLOWED"]))
    return found
sequence.SequenceProbability.score = slow
from scoremode.cli.main import entry
entry()
"""


def write_pairs(path: Path, word: str) -> Path:
    rows = ({"prompt": f"{word} {i}", "target": f" dog {i}"} for i in range(PAIRS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(model: str, pairs: Path, out: Path, seconds: float = 0.0) -> subprocess.Popen[str]:
    """The command, each chunk of which takes some seconds more."""
    command = [sys.executable, "-c", SLOWED, "prob", model, "--file", str(pairs), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOWED": str(seconds)}
    return forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in err
    return process.returncode, out, err


def wait_for_more(out: Path, chunks: int, processes: list[subprocess.Popen[str]]) -> None:
    """Until so many more chunks are done, or nobody works any more."""
    partial = out.with_name(out.name + ".partial")

    def size() -> int:
        return partial.stat().st_size if partial.exists() else 0

    enough = size() + chunks * CHUNK * 300  # bytes of a result, at least
    deadline = time.monotonic() + 120
    while size() < enough and any(p.poll() is None for p in processes):
        assert time.monotonic() < deadline, "nothing was scored"
        time.sleep(0.002)


@pytest.mark.slow
def test_the_same_command_twice_at_once_killed_and_resumed_ends_in_the_same_file(tmp_path: Path) -> None:
    model = "table:uniform"
    pairs, out = write_pairs(tmp_path / "pairs.jsonl", "The"), tmp_path / "r.jsonl"
    undisturbed = start(model, pairs, tmp_path / "whole.jsonl")
    moments = random.Random(5)
    for early in (True, False, True, False):
        both = [start(model, pairs, out, 0.5) for _ in range(2)]
        if early:  # whatever they are doing
            wait_for_more(out, moments.randrange(3), both)
            time.sleep(moments.random())
        else:  # while one works and the other was refused
            while all(process.poll() is None for process in both):
                time.sleep(0.01)
        for process in both:
            process.kill()
        ends = [finish(process) for process in both]
        complaints = [complaint for code, _, complaint in ends if code == 2]
        assert all("another process is writing" in complaint for complaint in complaints)
        assert [code for code, _, _ in ends if code not in (2, -9)] == []
        assert early or len(complaints) == 1
    code, printed, complaint = finish(start(model, pairs, out))
    assert (code, printed) == (0, f"{PAIRS} results in {out}\n"), complaint
    assert finish(undisturbed)[0] == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    left = {p.name for p in tmp_path.iterdir() if p.name.startswith((".r.", "r."))}
    assert left == {"r.jsonl", "r.jsonl.manifest.json"}


@pytest.mark.slow
def test_two_questions_for_one_file_one_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    one, other = write_pairs(tmp_path / "a.jsonl", "aaaa"), write_pairs(tmp_path / "b.jsonl", "bbbb")
    out = tmp_path / "r.jsonl"
    first = start("table:uniform", one, out, 0.2)
    wait_for_more(out, 2, [first])
    first.send_signal(signal.SIGSTOP)  # else a busy machine may finish it before the second one is there
    try:
        code, printed, complaint = finish(start("table:uniform", other, out))
    finally:
        first.send_signal(signal.SIGCONT)
    assert (code, printed) == (2, "")
    assert f"{out} contains results of another question (it differs in: pairs)" in complaint
    assert finish(first)[0] == 0
    lines = out.read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [f"aaaa {i}" for i in range(PAIRS)]
    again = finish(start("table:uniform", other, out))
    assert again[0] == 2
    assert "(it differs in: pairs)" in again[2]


@pytest.mark.slow
def test_two_questions_killed_do_not_mix(tmp_path: Path) -> None:
    """The issue's case: both killed, then one of them resumed to rows that answered the other's pairs."""
    one, other = write_pairs(tmp_path / "a.jsonl", "aaaa"), write_pairs(tmp_path / "b.jsonl", "bbbb")
    out = tmp_path / "r.jsonl"
    both = [start("table:uniform", one, out, 0.2), start("table:uniform", other, out, 0.2)]
    wait_for_more(out, 4, both)
    for process in both:
        process.kill()
        finish(process)
    outcomes = [finish(start("table:uniform", pairs, out)) for pairs in (one, other)]
    assert sorted(code for code, _, _ in outcomes) == [0, 2]
    word = "aaaa" if outcomes[0][0] == 0 else "bbbb"
    lines = out.read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [f"{word} {i}" for i in range(PAIRS)]
