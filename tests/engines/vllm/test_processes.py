"""Which processes belong to vLLM, and which do not."""

from __future__ import annotations

import multiprocessing.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from scoremode.engines.vllm.engine import VllmEngine
from scoremode.engines.vllm.support import LaunchArguments
from tests.engines.vllm.conftest import Judge, own, score


def test_a_stranger_that_was_started_meanwhile_survives_and_the_starting_thread_may_end(
    small_llama: Path, llama_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers: list[subprocess.Popen[bytes]] = []
    engines: list[VllmEngine] = []

    util: Any = multiprocessing.util
    stock = util.spawnv_passfds

    def meddle() -> None:
        strangers.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

    def spawn(*words: Any) -> Any:
        meddle()
        started = stock(*words)
        meddle()
        return started

    def begin() -> None:
        engines.append(VllmEngine(str(small_llama), LaunchArguments(max_model_len=64, max_num_batched_tokens=64)))

    monkeypatch.setattr(util, "spawnv_passfds", spawn)  # before and after the start of each of vLLM's processes
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    try:
        (engine,) = engines
        vllms = engine._processes.all()
        assert vllms
        assert not {p.pid for p in vllms} & {s.pid for s in strangers}
        time.sleep(2)  # for whatever watches the thread that is gone
        window = own(np.arange(40) * 7)
        (answers,) = score(engine, [window])
        llama_judge.check(window, answers)
        engine.close()
        assert [p for p in vllms if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        assert len(strangers) >= 2
        assert [s.poll() for s in strangers] == [None] * len(strangers)
    finally:
        for engine in engines:
            engine.close()
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_output_is_taken_and_given_back_whatever_was_closed(tmp_path: Path) -> None:
    """A program may have been started without standard streams: its own files must not be written to."""
    code = (
        "import os, sys\nfrom scoremode.engines.vllm.processes import VllmLog\n"
        "for fd in map(int, sys.argv[1].split()): os.close(fd)\n"
        "if sys.argv[1]: sys.stdout = sys.stderr = None\n"
        "before = [os.path.exists(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]\nlog = VllmLog()\n"
        "with log.taking_output():\n    mine = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)\n"
        "    os.write(1, b'to one, '); os.write(2, b'to two, ')\n"
        "    os.system('echo from a child; echo from a child >&2')\n    os.write(mine, b'own')\n    os.close(mine)\n"
        "after = [os.path.exists(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]\n"
        "os._exit(0 if before == after else 5)"
    )
    for number, closed in enumerate(("", "1", "2", "0 1", "1 2", "0 1 2")):
        log, own_file = tmp_path / f"log{number}", tmp_path / f"own{number}"
        done = subprocess.run(
            [sys.executable, "-c", code, closed, str(own_file)],
            env={**os.environ, "SCOREMODE_VLLM_LOG": str(log)},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), closed
        assert log.read_bytes() == b"to one, to two, from a child\nfrom a child\n", closed
        assert own_file.read_bytes() == b"own", closed


def test_a_forked_process_can_compute_although_this_one_has() -> None:
    """On a GPU, vLLM forks. If another engine computed before, as in a table of formats, it must not wait forever."""
    code = (
        "import os, torch\nfrom scoremode.engines.vllm.processes import end_openmp_threads\n"
        "compute = lambda: torch.zeros(10_000_000).fill_(1.0).sum()\n"
        "torch.set_num_threads(4)\ncompute()\nend_openmp_threads()\n"
        "if (child := os.fork()) == 0:\n    compute()\n    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\ncompute()"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_progress_is_seen_while_vllm_starts(tmp_path: Path) -> None:
    """It is written elsewhere than the output of vLLM, which goes to a log."""
    code = (
        "import sys, time\nfrom scoremode.engines.vllm.processes import VllmLog\n"
        "from scoremode.console.output import ProgressLines, lasting_stderr\n"
        "with lasting_stderr() as stream, ProgressLines('scoring', 'tokens', 0.05, stream) as progress:\n"
        "    progress.phase('loading a model')\n"
        "    with VllmLog().taking_output():\n        print('from vLLM', file=sys.stderr)\n        time.sleep(1.0)\n"
    )
    environment = {**os.environ, "SCOREMODE_VLLM_LOG": str(tmp_path / "log")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "scoremode: loading a model, for" in done.stderr
    assert "from vLLM" not in done.stderr
    assert (tmp_path / "log").read_text() == "from vLLM\n"
