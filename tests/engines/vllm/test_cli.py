"""The command line on vLLM: the numbers of the other engine, and a process that is really killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.runs import JOURNAL, MANIFEST
from tests.makers import OBEY_INTERRUPTS

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 200
FLAGS = ["--context-length", "64", "--stride", "32", "--engine", "vllm", "--max-num-batched-tokens", "64", "--json"]
ENTRY = OBEY_INTERRUPTS + "from scoremode.cli.main import entry; entry()"


def start(model: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENTRY, "ppl", str(model), "--text", TEXT, *FLAGS, "--out", str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """Processes of the session that ``pid`` leads, itself left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == pid and int(entry.name) != pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def engine_core(pid: int) -> int:
    for child in children(pid):
        try:
            if b"EngineCore" in Path(f"/proc/{child}/comm").read_bytes() + Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        except OSError:
            continue
    raise AssertionError("no engine core is running")


def assert_no_orphans(pid: int) -> None:
    """A moment is given to processes that end by themselves when they see that their parent is gone."""
    deadline = time.monotonic() + 15
    while left := children(pid):
        words = [Path(f"/proc/{child}/cmdline").read_bytes()[:200] for child in left]
        assert time.monotonic() < deadline, f"orphans: {words}"
        time.sleep(0.2)


def wait_for_scores(out: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not (out / JOURNAL).exists() or (out / JOURNAL).stat().st_size < 5000:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing was scored"
        time.sleep(0.005)


def test_a_killed_worker_gives_one_line_keeps_the_scores_and_the_run_goes_on(small_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(small_llama, out)
    wait_for_scores(out, process)
    os.kill(engine_core(process.pid), signal.SIGKILL)
    printed, complaint = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("the run ended before its worker was killed")
    assert process.returncode == 2
    assert printed == ""
    assert complaint.count("\n") == 1, complaint
    assert "repeat the command" in complaint
    assert not (out / MANIFEST).exists()
    assert (out / JOURNAL).stat().st_size > 5000
    assert_no_orphans(process.pid)

    second = start(small_llama, out)
    printed, complaint = second.communicate(timeout=300)
    assert second.returncode == 0, complaint
    result = json.loads(printed)
    assert (result["engine"], result["head"]) == ("vllm", "exact-fp32")
    assert_no_orphans(second.pid)
    judge = sm.ppl(str(small_llama), text=TEXT, context_length=64, stride=32)
    assert math.isclose(result["perplexity"], judge.perplexity.value, rel_tol=1e-4)
    assert result["plan_digest"] == judge.plan_digest
    assert result["targets"] == len(judge.scores)


def test_ctrl_c_leaves_no_process_behind(small_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(small_llama, out)
    wait_for_scores(out, process)
    os.killpg(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in complaint
    assert_no_orphans(process.pid)
