"""Write files atomically, and hash them."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import IO

TEMPORARY = ".scoremode-*.tmp"  # names of files that are still being written


def write_atomically(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, even if the machine stops in between."""
    with written_atomically(path) as file:
        file.write(data)


@contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that is renamed to ``path`` at the end of the block, or deleted if the block raises.

    A new file gets its mode from the umask; a file that is replaced keeps its mode.
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
    """Create a hidden file in the same folder. mkstemp is not used, because its mode 0600 ignores the umask."""
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
