"""A guard process that ends Ray's processes when this process ends.

Ray's own processes notice that their parent is gone, most within seconds, some within a minute. The guard is this file,
run as a process of its own, so it imports nothing of scoremode. When its standard input ends, the driver has ended.
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

SECONDS = 3.0  # time for guarded processes to end by themselves
PROC = Path("/proc")


def identity(pid: int) -> str | None:
    """Returns the id and the start time of a process, because ids are reused; None if the process has ended.

    The start time is the kernel's own tick count; a date would change when the clock is set.
    """
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else f"{pid}:{int(fields[19])}"  # a zombie has ended


def descendants(pid: int) -> list[str]:
    """Returns the identities of all children of a process, their children, and so on."""
    parents: dict[int, int] = {}
    for found in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(found.name)] = int((found / "stat").read_bytes().rpartition(b")")[2].split()[1])
    family = [pid]
    for parent in family:  # the list grows during the loop
        family += [child for child, its in parents.items() if its == parent]
    return [known for child in family[1:] if (known := identity(child)) is not None]


def start(folder: str, before: set[str]) -> subprocess.Popen[bytes] | None:
    """Starts a guard of the descendants not in ``before``; returns None if there are none or they cannot be listed."""
    guarded = [one for one in descendants(os.getpid()) if one not in before]
    if not guarded:
        return None
    command, nowhere = [sys.executable, "-I", "-S", __file__, folder, *guarded], subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True, cwd="/"
    )


def stop(guard: subprocess.Popen[bytes]) -> None:
    """Makes the guard end its processes now, and waits for the guard."""
    if guard.stdin is not None:
        guard.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(SECONDS + 2)


def main(folder: str, guarded: list[str]) -> None:
    """Waits until the driver has ended, then kills guarded processes that do not end soon, and removes the folder."""
    sys.stdin.buffer.read()
    until = time.monotonic() + SECONDS
    left = {int(one.partition(":")[0]): one for one in guarded}
    while left := {pid: one for pid, one in left.items() if identity(pid) == one}:
        if time.monotonic() > until:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
