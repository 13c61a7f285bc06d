"""One process at a time: a lock that the system releases when its holder ends, kill -9 included."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scoremode.errors import RunError

TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


class Lock:
    """A lock file. It exists while it is held and is removed on release, so nothing is left beside a user's files.

    >>> lock = Lock(Path("/tmp/scoremode-example.lock"))
    >>> lock.acquire(), Lock(lock.path).acquire()
    (True, False)
    >>> lock.release()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self, *, waiting: Callable[[], None] | None = None) -> bool:
        """Take the lock. If another process holds it: False, or with ``waiting``, call that once and wait."""
        assert self._file is None, "a lock is taken once"
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
            os.close(file)  # the holder before us removed this file when it was done: take the new one

    def release(self) -> None:
        """Let others in. Nothing if the lock is not held."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            if _is_still_there(file, self.path):
                self.path.unlink(missing_ok=True)  # while still holding it: whoever waits sees that the file is gone
        except OSError:
            pass  # a folder that was removed meanwhile has no lock to remove
        finally:
            os.close(file)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(
                f"{self.path.parent} cannot be written ({error.strerror})", fix="give another --out"
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
                fix="its file system has no file locks (NFS and Lustre need them switched on): use a local folder",
            ) from None
        return True


@contextmanager
def hold_lock(path: Path, *, busy: RunError, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock inside the block; ``busy`` is raised if another process has it and ``waiting`` is not given."""
    lock = Lock(path)
    if not lock.acquire(waiting=waiting):
        raise busy
    try:
        yield
    finally:
        lock.release()


def open_locked(path: Path, *, shared: bool) -> int | None:
    """An existing file, open and locked until it is closed; None if another process holds it the other way.

    Readers share, a remover does not. The file is neither made nor changed; OSError if it cannot be opened or locked.
    """
    import fcntl

    try:
        file = os.open(path, os.O_RDONLY if shared else os.O_RDWR)  # NFS wants a writable file for a lock of one's own
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
    """Is the locked file the one that the path names now?"""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(file)
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)


def _say_nothing() -> None:
    pass
