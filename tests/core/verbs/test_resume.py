"""A real process, really killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.disk.records import HEAD
from scoremode.core.store.runs import JOURNAL, MANIFEST
from tests import forked
from tests.makers import OBEY_INTERRUPTS

SLOWED = (
    OBEY_INTERRUPTS
    + """
import sys, time
from scoremode.core.scores import journal
add = journal.Journal.add
def slow(self, *given):
    add(self, *given)
    time.sleep(0.05)
journal.Journal.add = slow
from scoremode.cli.main import entry
entry()
"""
)


def command(folder: Path, out: Path, *more: str) -> list[str]:
    text = "the cat sat on the mat and the dog sat on the log. " * 30
    flags = ["--text", text, "--context-length", "48", "--stride", "24", "--batch-tokens", "96", "--json"]
    return ["ppl", str(folder), *flags, "--out", str(out), *more]


def windows_kept(out: Path) -> int:
    journal = out / JOURNAL
    return journal.stat().st_size // (HEAD.size + 8 + 24 * 36) if journal.exists() else 0


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return forked.Popen(
        [sys.executable, "-c", SLOWED, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(out: Path, windows: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while windows_kept(out) < windows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no window was scored"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_exactly_the_same_numbers(tiny: Path, tmp_path: Path) -> None:
    """On the decode path, windows of a batch that was not finished are decoded side by side again."""
    path: dict[str, Any] = {"path": "decode", "sequences": 5}
    out = tmp_path / "run"
    more = [word for name, value in path.items() for word in (f"--{name}", str(value))]
    process = start(command(tiny, out, *more))
    wait_for(out, 4, process)
    process.kill()
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == -9
    assert "Traceback" not in complaint
    assert not (out / MANIFEST).exists(), "a killed run must not look complete"
    kept = windows_kept(out)
    assert kept >= 4

    finished = forked.run(
        [sys.executable, "-m", "scoremode", *command(tiny, out, *more)], capture_output=True, text=True, check=True
    )
    resumed = sm.load(out)
    whole = sm.ppl(
        str(tiny),
        text=command(tiny, out)[3],
        context_length=48,
        stride=24,
        batch_tokens=96,
        out=tmp_path / "whole",
        **path,
    )
    assert json.loads(finished.stdout)["perplexity"] == whole.perplexity.value
    for name, column in whole.scores.columns():
        assert np.array_equal(column, getattr(resumed.scores, name)), name


@pytest.mark.slow
def test_what_was_done_is_not_done_again(tiny: Path, tmp_path: Path) -> None:
    """The journal of a killed run keeps its records byte for byte when the run goes on."""
    out = tmp_path / "run"
    process = start(command(tiny, out))
    wait_for(out, 6, process)
    process.kill()
    process.communicate(timeout=60)
    before = (out / JOURNAL).read_bytes()
    second = start(command(tiny, out))
    wait_for(out, windows_kept(out) + 4, second)
    second.kill()
    second.communicate(timeout=60)
    half = len(before) // 2  # well before whatever the kill tore
    assert (out / JOURNAL).read_bytes()[:half] == before[:half]
