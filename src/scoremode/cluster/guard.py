"""Ends what Ray started on this machine when the driver is gone, even if it was killed.

Ray's own processes notice that their parent is gone, most within seconds, some within a minute. This file is run as a
process of its own: its standard input ends when the driver does. It imports nothing of scoremode.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 3.0  # that Ray's processes have to end by themselves
PROC = Path("/proc")


def identity(pid: int) -> str | None:
    """Id and start time of a process, because an id may be used again; None if it has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else f"{pid}:{int(fields[19])}"


def descendants(pid: int) -> list[str]:
    """Identities of all processes that a process has started, and of those that they have."""
    parents: dict[int, int] = {}
    for found in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(found.name)] = int((found / "stat").read_bytes().rpartition(b")")[2].split()[1])
    family, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        children = [child for child, its in parents.items() if its == parent]
        family += children
        waiting += children
    return [known for child in family if (known := identity(child)) is not None]


def start(folder: str, before: set[str]) -> subprocess.Popen[bytes] | None:
    """Watch over what this process has started since ``before``; None where processes cannot be listed."""
    watched = [one for one in descendants(os.getpid()) if one not in before]
    if not watched:
        return None
    command = [sys.executable, "-I", "-S", __file__, folder, *watched]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True, cwd="/"
    )


def stop(guard: subprocess.Popen[bytes]) -> None:
    """Let it do its work now."""
    if guard.stdin is not None:
        guard.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(SECONDS + 2)


def main(folder: str, watched: list[str]) -> None:
    sys.stdin.buffer.read()  # until the driver is gone
    until = time.monotonic() + SECONDS
    pids = [int(one.partition(":")[0]) for one in watched]
    left = dict(zip(pids, watched, strict=True))
    while left and time.monotonic() < until:
        left = {pid: one for pid, one in left.items() if identity(pid) == one}
        time.sleep(0.05)
    for pid, one in left.items():
        if identity(pid) == one:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
