"""The size of the cache, remembered: one line with a total that was measured, then one line per entry kept since.

Lines are appended in one piece, so that processes need no lock. A total is measured again after a day, because kills,
deletions by hand and two measurements at once make it drift.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from scoremode.store.entries import USAGE
from scoremode.store.files import write_atomically

BELIEVED = 86_400.0  # seconds
LONGEST = 1 << 20  # bytes of a file that is still read: about 100,000 entries


def add(root: Path, size: int) -> int | None:
    """Count an entry that was kept just now; bytes in all, None if they must be measured."""
    try:
        file = os.open(root / USAGE, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        os.write(file, f"{size}\n".encode())
        if os.fstat(file).st_size > LONGEST:
            return None
        lines = os.pread(file, LONGEST, 0).decode("ascii").split("\n")
        measured, total = lines[0].split()
        if not 0 <= time.time() - float(measured) < BELIEVED:
            return None
        return int(total) + sum(int(line) for line in lines[1:] if line)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def write(root: Path, total: int) -> None:
    """Remember a total that was measured."""
    with suppress(OSError):
        write_atomically(root / USAGE, f"{int(time.time())} {total}\n".encode())
