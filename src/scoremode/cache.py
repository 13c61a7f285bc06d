"""Where scoremode keeps what it made once: the embedded model, runs without --out, hashes of large files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def cache_folder() -> Path:
    """``$SCOREMODE_CACHE``, else ``$XDG_CACHE_HOME/scoremode``, else ``~/.cache/scoremode``."""
    if chosen := os.environ.get("SCOREMODE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scoremode"


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or none of it, even if the machine stops in between."""
    with written_atomically(path) as file:
        file.write(data)


@contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name once all is written to it; if anything is raised before, nothing is left of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide results from the rest of a team
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """The file's sha256, computed again only when its size or time of change differ: checkpoints are large."""
    memo = cache_folder() / "sha256.json"
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    known = _read_memo(memo)
    if key not in known:
        known = {**_read_memo(memo), key: file_sha256(path)}
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memo, json.dumps(known, indent=0).encode())
        except OSError:
            pass  # a cache that cannot be written costs time, not correctness
    return str(known[key])


def _read_memo(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
