"""The cache folder, and the hashes of large files, which are remembered there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from scoremode.store.files import file_sha256, write_atomically
from scoremode.text.json_files import read_object

ALWAYS_READ = 4 << 20  # bytes of a file that is hashed anew each time

BEGINNING = 1 << 20  # bytes of a larger one that are

SETTLED = 2.0  # seconds; coarser than the clock of any file system in use


def cache_folder() -> Path:
    """``$SCOREMODE_CACHE``, else ``$XDG_CACHE_HOME/scoremode``, else ``~/.cache/scoremode``."""
    if chosen := os.environ.get("SCOREMODE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scoremode"


def remembered_sha256(path: Path) -> str:
    """The file's sha256. A large one is read whole again only if anything about it changed: checkpoints are large.

    Small files are always read. Of a large one the first MiB, which holds a safetensors header, is always read; the
    rest is believed while path, size, device, inode and both times of change are the same. A copy that keeps size and
    modification time (``cp -p``, ``rsync -t``) has another inode or another time of change of its inode.
    """
    if path.stat().st_size <= ALWAYS_READ:
        return file_sha256(path)
    memo, name, stamp = cache_folder() / "sha256.json", str(path.resolve()), _stamp(path)
    entry = _read_memo(memo).get(name)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("sha256"), str):
        return str(entry["sha256"])
    found = file_sha256(path)
    if _stamp(path) == stamp and _is_settled(path):  # else it may change again without another time of change
        entries = {key: value for key, value in _read_memo(memo).items() if isinstance(value, dict)}
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            written = {**entries, name: {"stamp": stamp, "sha256": found}}
            write_atomically(memo, json.dumps(written, indent=0).encode())
        except OSError:
            pass  # a cache that cannot be written costs time, not correctness
    return found


def _stamp(path: Path) -> str:
    """All that is cheap to know of a file's content."""
    with path.open("rb") as file:
        beginning = hashlib.sha256(file.read(BEGINNING)).hexdigest()
        stat = os.fstat(file.fileno())
    times = f"{stat.st_mtime_ns}|{stat.st_ctime_ns}"
    return f"{stat.st_size}|{stat.st_dev}|{stat.st_ino}|{times}|{beginning}"


def _is_settled(path: Path) -> bool:
    """Was the file last changed so long ago that another change would have another time?"""
    return abs(time.time() - path.stat().st_ctime) > SETTLED


def _read_memo(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
