"""Writes files atomically or at an offset, and hashes them."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import IO

import msgspec

from scoremode.core.disk.folders import HASHES, cache_folder, give_another
from scoremode.core.reading import open_regular, read_file
from scoremode.errors import RunError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LONGEST_WRITE = 1 << 30  # bytes per call
ALWAYS_READ = 4 << 20  # bytes; smaller files are hashed every time
BEGINNING = 1 << 20  # first bytes of a larger file that are hashed every time
SETTLED = 2.0  # seconds; longer than the time resolution of any file system in use


def write_atomically(path: Path, data: bytes) -> None:
    """Writes the whole file or nothing, even if the machine stops in between."""
    with written_atomically(path) as file:
        file.write(data)


@contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that is renamed to ``path`` at the end of the block, or deleted if the block raises.

    A new file gets its mode from the umask; a file that is replaced keeps its mode.
    """
    temporary = path.with_name(f".scoremode-{secrets.token_hex(8)}.tmp")  # short, even if the name is long
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666)  # mkstemp is not used, because its mode 0600 ignores the umask
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):  # there may be no file to replace, or the file system has no modes
            info = path.stat()
            if S_ISREG(info.st_mode):
                temporary.chmod(S_IMODE(info.st_mode) & 0o777)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of ``data`` at an offset. The file is not mapped, because a full disk would then kill the process."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(file, rest[:LONGEST_WRITE], offset)
        rest, offset = rest[written:], offset + written


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns OSError into RunError with a message of one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise RunError(
                f"{folder} cannot be written ({error.strerror or error})", fix=give_another(folder)
            ) from None
        sizes = ""
        with suppress(OSError):
            sizes = f" ({shutil.disk_usage(folder).free / 1e9:.2f} GB free)"
        fix = "free some space and run the same command again to resume, or give another --out"
        raise RunError(f"the disk of {folder} is full{sizes}", fix=fix) from None


def file_sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Returns the file's sha256. The hashes of large files are cached, because checkpoints are large.

    A file of up to ALWAYS_READ bytes is always read. Of a larger file, only the first MiB, which contains a safetensors
    header, is always read; the whole file is read again only if its path, size, device, inode, mtime or ctime changed.
    A copy that keeps size and modification time (``cp -p``, ``rsync -t``) has a different inode or ctime.
    """
    if path.stat().st_size <= ALWAYS_READ:
        return file_sha256(path)
    memo, name, stamp = cache_folder() / HASHES, str(path.resolve()), _stamp(path)
    entry = _read_memo(memo).get(name)
    if entry is not None and entry.stamp == stamp:
        return entry.sha256
    sha256 = file_sha256(path)
    settled = abs(time.time() - path.stat().st_ctime) > SETTLED  # else another change could leave the same times
    if settled and _stamp(path) == stamp:
        with suppress(OSError, ValueError):  # without a writable cache the file is hashed again next time
            memo.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memo, msgspec.json.encode({**_read_memo(memo), name: _Hashed(stamp, sha256)}))
    return sha256


def _stamp(path: Path) -> str:
    """Returns facts that show whether a file's content changed, as far as they are cheap to read."""
    with open_regular(path) as file:
        beginning = hashlib.sha256(file.read(BEGINNING)).hexdigest()
        stat = os.fstat(file.fileno())
    return f"{stat.st_size}|{stat.st_dev}|{stat.st_ino}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{beginning}"


class _Hashed(msgspec.Struct):
    stamp: str
    sha256: str


def _read_memo(path: Path) -> dict[str, _Hashed]:
    try:
        return msgspec.json.decode(read_file(path), type=dict[str, _Hashed])
    except (OSError, ValueError):
        return {}
