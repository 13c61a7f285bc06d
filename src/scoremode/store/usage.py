"""The remembered size of the cache: one line with a measured total, then one line per entry added since.

Each line is appended with one call, so that processes need no lock. The total is measured again after a day, because
kills, manual deletions and simultaneous measurements make it inaccurate.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from scoremode.store.entries import USAGE
from scoremode.store.files import write_atomically

LONGEST_AGE = 86_400.0  # seconds after which the total is measured again
LONGEST = 1 << 20  # bytes; about 100,000 entries. A longer file is not read


def add(root: Path, size: int) -> int | None:
    """Count a new entry; return the total bytes, or None if they must be measured again."""
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
        if not 0 <= time.time() - float(measured) < LONGEST_AGE:
            return None
        return int(total) + sum(int(line) for line in lines[1:] if line)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def write(root: Path, total: int) -> None:
    """Store a measured total."""
    with suppress(OSError):
        write_atomically(root / USAGE, f"{int(time.time())} {total}\n".encode())
