"""Where scoremode keeps what it made once: the embedded model, runs without --out, hashes of large files."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import IO, Any

from scoremode.json_files import read_object

TEMPORARY = ".scoremode-*.tmp"  # files that have not taken their name yet
ALWAYS_READ = 4 << 20  # bytes of a file that is hashed anew each time
BEGINNING = 1 << 20  # bytes of a larger one that are
SETTLED = 2.0  # seconds; coarser than the clock of any file system in use


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
    """A file that takes its name once all is written to it; if anything is raised before, nothing is left of it.

    A new file gets the mode that the user's umask asks for; a file that is replaced keeps its mode.
    """
    handle, temporary = _create_beside(path)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _keep_mode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _create_beside(path: Path) -> tuple[int, Path]:
    """A new hidden file in the same folder. Not mkstemp, whose 0600 would have to be widened past the umask."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        temporary = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))  # short, however long the name is
        try:
            return os.open(temporary, flags, 0o666), temporary
        except FileExistsError:
            continue


def _keep_mode(path: Path, temporary: Path) -> None:
    with suppress(OSError):  # nothing to keep, or a file system without modes
        found = path.stat()
        if S_ISREG(found.st_mode):
            temporary.chmod(S_IMODE(found.st_mode) & 0o777)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
