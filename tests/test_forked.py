"""A forked process does what a fresh one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked

PROGRAMS = (
    "import sys; print(sys.argv, sys.path[0], sys.stdin.read(), __name__); print('x', file=sys.stderr)",
    "import os; print(os.getcwd(), os.environ['WORD'], os.getppid(), os.getsid(0) == os.getpid())",
    "import signal; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)))",
    "import atexit; atexit.register(print, 'last'); raise SystemExit(3)",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "raise SystemExit('no more')",
    "1 / 0",
    "raise KeyboardInterrupt",
    "import os; os.kill(os.getpid(), 9)",
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_and_prints_as_in_a_fresh_interpreter(program: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"env": {**os.environ, "WORD": "given"}, "cwd": tmp_path, "start_new_session": True}
    runs: list[Any] = [forked.run, subprocess.run]
    found = []
    for run in runs:
        done = run([sys.executable, "-c", program, "a", "b c"], input="in", capture_output=True, text=True, **how)
        found.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    assert found[0] == found[1]


def test_it_is_killed_like_any_child_and_leaves_none_behind() -> None:
    process = forked.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    process.stdout.close()
