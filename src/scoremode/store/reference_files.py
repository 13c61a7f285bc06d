"""The files of a reference: created with all their space, written at an offset, hashed; a full disk in one line."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scoremode.errors import RunError
from scoremode.places.cache_home import give_another
from scoremode.store.reference import CHUNK, Progress

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def make_shard(path: Path, header: bytes, size: int) -> None:
    """Create a file of this size with all its space allocated, so that a later write cannot find the disk full."""
    with path.open("wb", buffering=0) as file:
        write_at(file.fileno(), memoryview(header), 0)
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # not supported everywhere; a full disk is then detected later
            if isinstance(error, OSError) and error.errno not in NO_PREALLOCATION:
                raise
            file.truncate(size)
        os.fsync(file.fileno())


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``. Not mapped: with a mapping, a full disk would kill the process instead of raising."""
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at : at + (1 << 30)], offset + at)


def hash_files(paths: list[Path], progress: Progress | None) -> dict[str, str]:
    """The sha256 of each file, by name; each file is flushed to disk before it is hashed."""
    total, done, hashes = sum(path.stat().st_size for path in paths), 0, {}
    for path in paths:
        hasher = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            while chunk := file.read(CHUNK):
                hasher.update(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
        hashes[path.name] = hasher.hexdigest()
    return hashes


@contextmanager
def disk_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn OSError into RunError with a message of one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise RunError(
                f"{folder} cannot be written ({error.strerror or error})", fix=give_another(folder)
            ) from None
        sizes = ""
        with suppress(OSError):
            free = f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free"
            sizes = f" ({free})" if needed is None else f" (the states take {needed / 1e9:.2f} GB, {free})"
        fix = "free some space and run the same command again to resume, or give another --out"
        raise RunError(f"the disk of {folder} is full{sizes}", fix=fix) from None
