"""File locks between processes, which the system releases when the holder ends, even by kill -9."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scoremode.errors import RunError
from scoremode.places.cache_home import give_another

TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


class Lock:
    """A lock file. It exists while the lock is held and is removed on release, so nothing is left in a user's folder.

    >>> lock = Lock(Path("/tmp/scoremode-example.lock"))
    >>> lock.acquire(), Lock(lock.path).acquire()
    (True, False)
    >>> lock.release()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self, *, waiting: Callable[[], None] | None = None) -> bool:
        """Take the lock. If another process holds it: return False, or with ``waiting``, call that once and wait."""
        assert self._file is None, "this lock is already held"
        while True:
            file = self._open()
            try:
                if not self._take(file, wait=False):
                    if waiting is None:
                        os.close(file)
                        return False
                    waiting()
                    waiting = _say_nothing
                    self._take(file, wait=True)
                if _is_still_there(file, self.path):
                    self._file = file
                    return True
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # the previous holder removed this file on release: try again with the new one

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            if _is_still_there(file, self.path) and os.fstat(file).st_size == 0:  # else it is somebody's file
                self.path.unlink(missing_ok=True)  # before the release, so that a waiting process sees it is gone
        except OSError:
            pass  # the folder was removed in the meantime, and the lock file with it
        finally:
            os.close(file)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(
                f"{self.path.parent} cannot be written ({error.strerror})", fix=give_another(self.path.parent)
            ) from None

    def _take(self, file: int, *, wait: bool) -> bool:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in TAKEN:
                return False
            raise RunError(
                f"{self.path.parent} cannot be locked ({error.strerror})",
                fix="its file system has no file locks (NFS and Lustre need them enabled): use a local folder",
            ) from None
        return True


@contextmanager
def hold_lock(path: Path, *, busy: RunError, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock inside the block; raise ``busy`` if another process holds it and ``waiting`` is not given."""
    lock = Lock(path)
    if not lock.acquire(waiting=waiting):
        raise busy
    try:
        yield
    finally:
        lock.release()


def open_locked(path: Path, *, shared: bool) -> int | None:
    """Open and lock an existing file until it is closed; None if another process holds a conflicting lock.

    Readers share the lock, a remover does not. The file is not created or changed; OSError if it cannot be locked.
    """
    import fcntl

    try:
        file = os.open(path, os.O_RDONLY if shared else os.O_RDWR)  # NFS needs a writable file for an exclusive lock
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


def _is_still_there(file: int, path: Path) -> bool:
    """Is the locked file still the one at this path?"""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(file)
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)


def _say_nothing() -> None:
    pass
