"""File locks between processes. The system releases a lock when its holder ends, even by kill -9."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scoremode.core.disk.folders import give_another
from scoremode.errors import RunError, print_line

TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}

_shared: dict[tuple[int, int], int] = {}  # files that stay locked until this process ends, by device and inode


class Lock:
    """A lock file. It exists while the lock is held and is removed on release: nothing is left in a user's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self, *, waiting: str | None = None) -> bool:
        """Takes the lock. If another process holds it, returns False, or with ``waiting``, prints that line and waits.

        A process that may wait creates the folder, because the cache may have removed it in the meantime.
        """
        assert self._file is None, "this lock is already held"
        is_told = False
        while True:
            file = self._open(make_folder=waiting is not None)
            try:
                if not self._flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    if waiting is None:
                        os.close(file)
                        return False
                    if not is_told:
                        print_line(waiting)
                    is_told = True
                    self._flock(file, fcntl.LOCK_EX)
                if self._is_current(file):
                    self._file = file
                    return True
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # the previous holder removed this file on release: try again with the new one

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with suppress(OSError):  # the folder was removed in the meantime, and the lock file with it
            if self._is_current(file) and os.fstat(file).st_size == 0:  # a file with content belongs to somebody else
                self.path.unlink(missing_ok=True)  # before the release, so that a waiting process sees the removal
        os.close(file)

    def _open(self, *, make_folder: bool) -> int:
        try:
            if make_folder:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise RunError(
                f"{self.path.parent} cannot be written ({error.strerror})", fix=give_another(self.path.parent)
            ) from None

    def _flock(self, file: int, how: int) -> bool:
        try:
            fcntl.flock(file, how)
        except OSError as error:
            if error.errno in TAKEN:
                return False
            raise RunError(
                f"{self.path.parent} cannot be locked ({error.strerror})",
                fix="its file system has no file locks (NFS and Lustre need them enabled): use a local folder",
            ) from None
        return True

    def _is_current(self, file: int) -> bool:
        """Is the open file still the file at this path?"""
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False


@contextmanager
def hold_lock(path: Path, *, waiting: str) -> Iterator[None]:
    """Holds a lock inside the block. If another process holds it, prints ``waiting`` and waits."""
    lock = Lock(path)
    lock.acquire(waiting=waiting)
    try:
        yield
    finally:
        lock.release()


def open_locked(path: Path, *, shared: bool) -> int | None:
    """Opens and locks an existing file until it is closed. Returns None if another process has a conflicting lock.

    Readers share the lock; a remover needs it alone. The file is not changed. Raises OSError if it cannot be locked.
    """
    try:
        # NFS needs a writable file for an exclusive lock
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK if shared else os.O_RDWR)
    except PermissionError:
        file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in TAKEN:
            return None
        raise
    return file


def share_until_exit(path: Path) -> None:
    """Locks an existing file as a reader until this process ends; does nothing if it cannot be locked."""
    with suppress(OSError):
        info = path.stat()
        if (info.st_dev, info.st_ino) not in _shared and (file := open_locked(path, shared=True)) is not None:
            _shared[info.st_dev, info.st_ino] = file


def end_sharing(path: Path) -> None:
    """Gives up the lock of ``share_until_exit``; does nothing if it is not held."""
    with suppress(OSError):
        info = path.stat()
        if (file := _shared.pop((info.st_dev, info.st_ino), None)) is not None:
            os.close(file)
