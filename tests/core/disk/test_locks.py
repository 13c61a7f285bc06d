"""Locks: one holder at a time, a kill releases them, waiting ends with the holder, no file is left."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scoremode.core.disk.locks import Lock, hold_lock
from scoremode.errors import RunError

HOLD = "import sys, time; from pathlib import Path; from scoremode.core.disk.locks import Lock; "
HOLD += "lock = Lock(Path(sys.argv[1])); print(lock.acquire(), flush=True); time.sleep(60)"


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert not Lock(path).acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = Lock(path)
    assert lock.acquire()
    lock.release()
    assert not path.exists()


def test_waiting_says_so_once_and_ends_with_the_holder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Lock(tmp_path / ".lock"), Lock(tmp_path / ".lock")
    assert first.acquire()
    threading.Timer(0.3, first.release).start()
    began = time.monotonic()
    assert second.acquire(waiting="waiting for the first")
    assert time.monotonic() - began > 0.2
    assert capsys.readouterr().err == "waiting for the first\n"
    assert not Lock(tmp_path / ".lock").acquire(), "the file that the first holder removed must not split the lock"
    second.release()


def test_many_threads_never_hold_it_together(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            lock = Lock(tmp_path / ".lock")
            lock.acquire(waiting="waiting")
            inside += 1
            most = max(most, inside)
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_missing_folder_and_a_file_system_without_locks_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with pytest.raises(RunError, match="cannot be written"):
        Lock(tmp_path / "missing" / ".lock").acquire()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match="No locks available"):
        Lock(tmp_path / ".lock").acquire()


def test_a_file_with_something_in_it_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("somebody's notes")
    with hold_lock(tmp_path / ".lock", waiting="waiting"):
        pass
    assert (tmp_path / ".lock").read_text() == "somebody's notes"
