"""The command line with vLLM: the same numbers as the other engine, and processes that are really killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import scoremode as sm
from scoremode.core.store.runs import JOURNAL, MANIFEST
from tests import forked
from tests.makers import OBEY_INTERRUPTS

SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "
TEXT = SENTENCE * 900  # takes seconds to score on a fast machine too, so that the signal arrives before the end
FLAGS = ["--context-length", "64", "--stride", "32", "--engine", "vllm", "--max-num-batched-tokens", "64", "--json"]
ENTRY = OBEY_INTERRUPTS + "from scoremode.cli.main import entry; entry()"
# the same from Python, with two ranks, and a very long text
LIBRARY = """
import sys
import scoremode as sm
if __name__ == "__main__":
    sm.ppl(sys.argv[1], text=sys.argv[3] * 9999, engine="vllm", tensor_parallel_size=2, out=sys.argv[2],
           context_length=64, stride=32, max_num_batched_tokens=64)
"""
RESUME = "what was scored is kept: run the same command again to resume"
Process = subprocess.Popen[str]


def start(model: Path, out: Path, **environment: str) -> Process:
    return _popen("-c", ENTRY, "ppl", str(model), "--text", TEXT, *FLAGS, "--out", str(out), **environment)


def _popen(*arguments: str, **environment: str) -> Process:
    pipe, its = subprocess.PIPE, {**os.environ, **environment}
    command = [sys.executable, *arguments]
    return forked.VllmPopen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=its)


def children(pid: int) -> list[int]:
    """Processes of the session that ``pid`` leads, without itself."""
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


def named(pid: int, name: bytes) -> list[int]:
    """Those of them whose name or command contains these words."""
    found = []
    for child in children(pid):
        try:
            words = Path(f"/proc/{child}/comm").read_bytes() + Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        found += [child] if name in words else []
    return found


def engine_core(process: Process) -> int:
    return wait_for_process(process, b"EngineCore")


def wait_for_process(process: Process, name: bytes) -> int:
    deadline = time.monotonic() + 600
    while not (found := named(process.pid, name)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no process {name!r} was started"
        time.sleep(0.05)
    return found[0]


def assert_no_orphans(pid: int) -> None:
    """Gives processes a moment to end by themselves after their parent is gone."""
    deadline = time.monotonic() + 60
    while left := children(pid):
        words = [Path(f"/proc/{child}/cmdline").read_bytes()[:200] for child in left]
        assert time.monotonic() < deadline, f"orphans: {words}"
        time.sleep(0.2)


def wait_for_scores(out: Path, process: Process, size: int = 5000) -> None:
    deadline = time.monotonic() + 600
    while not (out / JOURNAL).exists() or (out / JOURNAL).stat().st_size < size:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing was scored"
        time.sleep(0.005)


def test_a_killed_engine_and_a_terminated_run_give_one_line_and_the_run_resumes(
    small_llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(small_llama, out)
    core = engine_core(process)
    wait_for_scores(out, process)
    os.kill(core, signal.SIGKILL)
    printed, complaint = process.communicate(timeout=120)
    assert (process.returncode, printed) == (2, "")
    assert complaint.count("\n") == 1, complaint
    assert "run the same command again to resume" in complaint
    assert not (out / MANIFEST).exists()
    kept = (out / JOURNAL).stat().st_size
    assert kept > 5000
    assert_no_orphans(process.pid)

    second = start(small_llama, out)
    wait_for_scores(out, second, kept + 1000)
    second.terminate()
    printed, complaint = second.communicate(timeout=120)
    assert (second.returncode, printed, complaint) == (143, "", f"scoremode: terminated; {RESUME}\n")
    assert (out / JOURNAL).stat().st_size > kept
    assert_no_orphans(second.pid)

    third = start(small_llama, out)
    printed, complaint = third.communicate(timeout=300)
    assert third.returncode == 0, complaint
    result = json.loads(printed)
    assert (result["engine"], result["head"]) == ("vllm", "exact-fp32")
    assert_no_orphans(third.pid)
    judge = sm.ppl(str(small_llama), text=TEXT, context_length=64, stride=32)
    assert math.isclose(result["perplexity"], judge.perplexity.value, rel_tol=1e-4)
    assert result["plan_digest"] == judge.plan_digest
    assert result["targets"] == len(judge.scores)


def test_ctrl_c_twice_while_scoring(small_llama: Path, tmp_path: Path) -> None:
    process = start(small_llama, tmp_path / "run")
    wait_for_scores(tmp_path / "run", process)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)  # like a terminal: to all of them
    _, complaint = process.communicate(timeout=120)
    assert complaint == f"scoremode: interrupted; {RESUME}\n"
    assert process.returncode in (130, -signal.SIGINT), "the second one ends it at once"
    assert_no_orphans(process.pid)


def test_ctrl_c_while_vllm_starts(small_llama: Path, tmp_path: Path) -> None:
    """During the start vLLM does not react to signals, and swallows a KeyboardInterrupt in the waiting process."""
    process = start(small_llama, tmp_path / "run")
    engine_core(process)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=120)
    assert (process.returncode, complaint) == (130, "scoremode: interrupted; nothing new was kept yet\n")
    assert time.monotonic() - began < 20
    assert_no_orphans(process.pid)


def test_a_process_that_just_began_to_import_vllm_does_not_outlive_its_parent(
    small_llama: Path, tmp_path: Path
) -> None:
    process = start(small_llama, tmp_path / "run", **{forked.FRESH_ENGINES: "1"})
    wait_for_process(process, b"spawn_main")
    process.kill()
    process.wait()
    assert_no_orphans(process.pid)


def test_no_rank_outlives_a_python_program_that_is_killed(small_llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(LIBRARY)
    process = _popen(str(script), str(small_llama), str(tmp_path / "run"), SENTENCE)
    wait_for_scores(tmp_path / "run", process)
    assert len(named(process.pid, b"Worker")) == 2
    process.kill()
    process.wait()
    assert_no_orphans(process.pid)
