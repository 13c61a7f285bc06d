"""Rollouts of Transformers that are killed: the same command writes what is missing, and all texts are the same."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import scoremode as sm
from scoremode.core.disk.folders import PARTIAL_TEXTS
from tests import forked

PROMPTS = [f"{n} the lazy dog" for n in range(16)]


def test_a_killed_command_resumes_to_the_same_texts(tiny: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "written"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    how = {"temperature": 1.0, "max_tokens": 60, "sequences": 2, "dtype": "float32"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]
    asked = [sys.executable, "-m", "scoremode", "rollouts", str(tiny), "--engine", "transformers", *words]
    asked += ["--prompts", str(prompts), "--out", str(out)]
    started = forked.Popen(asked)
    journal, until = out / PARTIAL_TEXTS, time.monotonic() + 120
    while not (journal.exists() and journal.stat().st_size > 3000):  # some texts, and not all
        assert started.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.002)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert journal.exists(), "it was finished before it could be killed"
    kept = journal.read_bytes()
    resumed = sm.rollouts(str(tiny), prompts, out=out, engine="transformers", **how)  # type: ignore[arg-type]
    whole = sm.rollouts(str(tiny), prompts, engine="transformers", **how)  # type: ignore[arg-type]
    assert len(kept) > 3000
    for one, other in ((resumed.written, whole.written), (resumed.raw_logprob, whole.raw_logprob)):
        assert [a.tolist() for a in one] == [b.tolist() for b in other]
