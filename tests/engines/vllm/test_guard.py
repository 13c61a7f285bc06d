"""Processes that watch the scoremode process. Real processes, but no engine: each one simulates one of vLLM's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="needs vLLM")
import psutil

from scoremode.engines.vllm import plugin

CHILD = """
import os, sys, time
from scoremode.engines.vllm import plugin
plugin.watch_parent()
plugin.watch_parent()                  # may be called repeatedly
if os.fork():                         # a forked worker does not load plugins again
    open(sys.argv[1] + ".child", "w").write(str(os.getpid()))
else:
    open(sys.argv[1] + ".worker", "w").write(str(os.getpid()))
time.sleep(300)
"""
PARENT = """
import os, subprocess, sys, threading, time
from scoremode.engines.vllm import plugin
if sys.argv[2] == "marked":
    os.environ[plugin.PARENT] = str(os.getpid())
begin = lambda: subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1]], start_new_session=True)
if sys.argv[2] == "marked":           # started by a thread that ends
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
else:
    begin()
time.sleep(300)
"""


def family(folder: Path, kind: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A process, and its child and grandchild once they run."""
    files = [folder / "pid.child", folder / "pid.worker"]
    arguments = [str(folder / "pid"), kind, CHILD]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments], start_new_session=True)
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "they did not start"
        time.sleep(0.05)
    return parent, [psutil.Process(int(file.read_text())) for file in files]


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    parent, others = family(tmp_path, "marked")
    yield parent, others
    for process in (parent, *others):
        if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
            process.kill()
    parent.wait()


def test_they_end_with_the_process_they_work_for(marked: tuple[subprocess.Popen[bytes], list[psutil.Process]]) -> None:
    """At first nobody reaps the killed process: it is a zombie, which counts as ended."""
    parent, others = marked
    time.sleep(1.5)
    assert all(p.is_running() for p in others), "they must not end with the thread that started them"
    os.kill(parent.pid, signal.SIGKILL)
    assert psutil.wait_procs(others, timeout=60)[1] == []


def test_a_worker_ends_with_its_own_parent(marked: tuple[subprocess.Popen[bytes], list[psutil.Process]]) -> None:
    parent, (child, worker) = marked
    child.kill()
    assert psutil.wait_procs([worker], timeout=60)[1] == []
    assert parent.poll() is None


def test_a_process_that_was_not_asked_to_score_is_left_alone(tmp_path: Path) -> None:
    parent, others = family(tmp_path, "unmarked")
    try:
        parent.kill()
        parent.wait()
        time.sleep(2)
        assert all(p.is_running() for p in others)
    finally:
        for process in others:
            process.kill()


def test_one_that_starts_after_the_end_of_its_parent_ends_too(tmp_path: Path) -> None:
    """The scoremode process was killed while this one was still importing."""
    finished = subprocess.Popen(["sleep", "60"])
    finished.kill()
    finished.wait()
    code = "import time\nfrom scoremode.engines.vllm import plugin\nplugin.watch_parent()\ntime.sleep(60)"
    environment = {**os.environ, plugin.PARENT: str(finished.pid)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False).returncode == 1


def test_the_engines_process_watches_before_anything_of_vllm_is_imported() -> None:
    """Its function is unpickled first: after that, the process imports and waits for a long time."""
    code = (
        "import pickle, sys, threading\nfrom scoremode.engines.vllm.plugin import EngineCoreTarget\n"
        "pickle.loads(pickle.dumps(EngineCoreTarget(None)))\n"
        "print([t.name for t in threading.enumerate() if t.name == 'scoremode-guard'], 'vllm' in sys.modules)"
    )
    environment = {**os.environ, plugin.PARENT: str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['scoremode-guard'] False\n"
