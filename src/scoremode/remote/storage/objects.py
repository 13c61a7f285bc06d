"""The files of a place: listed, read, written whole, removed. Operations that may still work are tried again.

An object has its name only when it is complete: object stores work that way; elsewhere it is written under another
name first. Files are sent and fetched in pieces, so memory does not grow with them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from io import RawIOBase
from pathlib import Path
from typing import Any, TypeVar

from scoremode.core.arguments import SERVERS, seconds_in
from scoremode.core.disk.uri import Place
from scoremode.errors import StorageError, one_line
from scoremode.remote.storage.file_systems import ADDRESS, UNREACHABLE, creating, file_system, reason_of, refusal
from scoremode.remote.storage.hub import forget_listings, is_missing_file

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds between two attempts
FIRST_CONTACT = 2.0  # seconds for which a server is tried that has never answered: its name may be wrong
PATIENCE = "SCOREMODE_STORAGE_PATIENCE"
ANSWERED: set[tuple[str, str]] = set()
"""The servers and buckets that have answered this process, by scheme and name. If they fail later, that may pass."""

PIECE = 4 << 20  # bytes that are read or written at once
UNFINISHED = ".scoremode-unfinished-"
ATOMIC = ("s3", "gs", "abfs", "abfss", "hf")  # an object appears when it is complete, never before
NO_FOLDERS = ("s3", "gs", "hf")  # they are parts of names, or come with the first file
HUB_SECONDS = 5.0  # for which a request to the hub is tried again, beyond what its own client does


def patience() -> float:
    """Seconds for which failing requests are tried again: ``$SCOREMODE_STORAGE_PATIENCE``."""
    return seconds_in(PATIENCE, 60.0, 0.0, "one, as in 60")


@dataclass(frozen=True, slots=True)
class Found:
    """A file or folder that exists."""

    name: str  # relative to the place that was listed
    size: int
    modified: float | None  # seconds since 1970, by the server's clock
    is_folder: bool = False


class Objects:
    """The files in a folder elsewhere, by names relative to it. ``Objects(place)`` asks nothing of a server yet."""

    def __init__(self, place: Place, *, seconds: float | None = None) -> None:
        """``seconds``: how long a failing request is tried again; by default as long as ``patience`` says."""
        self.place = place
        self._seconds = patience() if seconds is None else seconds
        if place.scheme == "hf":
            self._seconds = min(self._seconds, HUB_SECONDS)
        self._arrow = file_system(place)
        self._fsspec: Any | None = getattr(getattr(self._arrow, "handler", None), "fs", None)

    def _path(self, name: str) -> str:
        scheme, inner = self.place.scheme, self.place.path
        if scheme in SERVERS:
            inner = f"{scheme}://{inner}"
        elif self._fsspec is not None:
            inner = str(self._fsspec._strip_protocol(f"{scheme}://{inner}"))  # without the host
        elif scheme in ("hdfs", "viewfs"):
            inner = "/" + inner.partition("/")[2]
        return f"{inner}/{name}" if name else inner

    def _place(self, name: str) -> Place:
        return self.place / name if name else self.place

    def _attempt(self, name: str, doing: str, work: Callable[[], T], *, may_be_absent: bool = False) -> T:
        """The result of ``work``, which is called again after errors that may pass; StorageError after others.

        If the file ``may_be_absent``, FileNotFoundError is passed on.
        """
        began, pause, server = time.monotonic(), FIRST_PAUSE, (self.place.scheme, self.place.root)
        while True:
            try:
                found = work()
                ANSWERED.add(server)
                return found
            except Exception as error:  # each file system of fsspec raises its own kinds
                if may_be_absent and is_missing_file(error):
                    raise
                reason = reason_of(error)
                is_new = reason is UNREACHABLE and server not in ANSWERED and not os.environ.get(PATIENCE)
                seconds = min(self._seconds, FIRST_CONTACT) if is_new else self._seconds
                passes = not isinstance(error, StorageError) and reason.may_pass
                if not passes or time.monotonic() + pause > began + seconds:
                    raise refusal(self._place(name), doing, error) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _if_there(self, name: str, work: Callable[[], T]) -> T | None:
        """The result of ``work``, which reads a file; None if there is no such file."""
        with suppress(FileNotFoundError):
            return self._attempt(name, "be read", work, may_be_absent=True)
        return None

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def listed(self, folder: str = "", *, deep: bool = False) -> list[Found]:
        """The files in a folder, sorted by name; none if there is no such folder."""
        if self.place.scheme == "hf":
            return self._if_there(folder, lambda: self._listed_on_hub(folder, deep=deep)) or []
        from pyarrow import fs

        before = self._path(folder)
        selector = fs.FileSelector(before, recursive=deep, allow_not_found=True)
        found = self._attempt(folder, "be listed", lambda: self._arrow.get_file_info(selector))
        below = [(info, info.path[len(before) :].lstrip("/")) for info in found]
        return sorted((self._found(info, name) for info, name in below if name), key=lambda one: one.name)

    def look(self, name: str = "") -> Found | None:
        """The file or folder of that name; None if there is none."""
        if self.place.scheme in SERVERS:
            return self._attempt(name, "be read", lambda: self._look_on_server(name))
        if self.place.scheme == "hf":
            return self._if_there(name, lambda: self._look_on_hub(name))
        info = self._attempt(name, "be read", lambda: self._arrow.get_file_info(self._path(name)))
        return self._found(info, name) if info.type.name != "NotFound" else None

    def _look_on_server(self, name: str) -> Found | None:
        """Look for a file over HTTP. fsspec calls every file that it cannot read missing: raise the real reason."""
        try:
            assert self._fsspec is not None
            return Found(name, self._fsspec.info(self._path(name))["size"] or 0, None)
        except FileNotFoundError as error:
            cause = error.__cause__
            status = getattr(cause, "status", None)
            if cause is None or status in (404, 410):
                return None
            if status is not None:
                raise OSError(f"HTTP status {status}") from None  # some of them pass
            why = one_line(str(cause))[:200] or type(cause).__name__
            raise StorageError(
                f"{self._place(name)} cannot be read: the server does not answer ({why})", fix=ADDRESS
            ) from None

    def _listed_on_hub(self, folder: str, *, deep: bool) -> list[Found]:
        """List a folder of the hub. Arrow would call a folder empty that cannot be read: raise the real reason."""
        assert self._fsspec is not None
        self._fsspec.invalidate_cache()
        before = self._path(folder)
        found = self._fsspec.find(before, withdirs=True, detail=True, maxdepth=None if deep else 1).values()
        if not found:
            self._fsspec.info(before)  # raises if the folder is not merely empty
        below = [(one, one["name"][len(before) :].lstrip("/")) for one in found]
        files = [Found(name, one["size"] or 0, None, one["type"] == "directory") for one, name in below if name]
        return sorted(files, key=lambda one: one.name)

    def _look_on_hub(self, name: str) -> Found:
        assert self._fsspec is not None
        self._fsspec.invalidate_cache()
        found = self._fsspec.info(self._path(name))
        return Found(name, found["size"] or 0, None, is_folder=found["type"] == "directory")

    def _found(self, info: Any, name: str) -> Found:
        modified = info.mtime
        if modified is None and self._fsspec is not None and info.type.name == "File":
            with suppress(Exception):  # not every file system knows it
                modified = self._fsspec.modified(info.path)
                modified = modified if modified.tzinfo is not None else modified.replace(tzinfo=UTC)
        seconds = None if modified is None else modified.timestamp()
        return Found(name, info.size or 0, seconds, is_folder=info.type.name == "Directory")

    def version(self, name: str = "") -> str | None:
        """Everything that a server tells about a file's content without sending it; None if there is no such file."""
        found = self.look(name)
        if found is None or found.is_folder:
            return None
        marks = self._attempt(name, "be read", lambda: self._marks(self._path(name)))
        return f"{found.size}|{found.modified}|{marks}"

    def _marks(self, path: str) -> list[str]:
        if self._fsspec is not None:
            about = self._fsspec.info(path)
            return [str(about.get(key)) for key in ("ETag", "etag", "sha256", "oid", "blob_id", "LastModified")]
        with self._arrow.open_input_file(path) as file:
            return sorted(f"{key}={value!r}" for key, value in (file.metadata() or {}).items())

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, name: str, *, most: int) -> bytes | None:
        """The content of a small file, at most ``most`` bytes of it; None if there is no such file."""

        def work() -> bytes:
            if self.place.scheme == "hf":
                forget_listings()
            with self._arrow.open_input_stream(self._path(name)) as stream:
                return bytes(stream.read(most))

        return self._if_there(name, work)

    def pieces(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        """The bytes of a file from ``begin`` to ``end``, in pieces. If the connection breaks, a piece is read again."""
        source: Any | None = None

        def work() -> bytes:
            nonlocal source
            try:
                source = source or self._arrow.open_input_file(self._path(name))
                if source.size() < end:
                    raise StorageError(
                        f"{self._place(name)} has {source.size()} bytes instead of {end}",
                        fix="it was changed: try again",
                    )
                data = bytes(source.read_at(min(PIECE, end - begin), begin))
            except Exception:
                source = None
                raise
            if not data:
                raise OSError("unexpected end of the file")
            return data

        while begin < end:
            piece = self._attempt(name, "be read", work)
            yield piece
            begin += len(piece)

    def fetch(self, name: str, to: Path, *, size: int) -> None:
        """Append to ``to`` the bytes that it lacks of a file of this size; start again if ``to`` is longer.

        The caller checks the result: the file may have been changed at the other end meanwhile.
        """
        with to.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)
                file.seek(0)
            for piece in self.pieces(name, file.tell(), size):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, name: str, data: bytes) -> None:
        self._attempt(name, "be written", lambda: self._put(name, [data], len(data)))

    @property
    def creates(self) -> bool:
        """Does ``create`` use a conditional write of the store?"""
        return creating(self.place) is not None

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one of that name; return whether it was written.

        Without a conditional write of the store, two processes at once may both be told that they wrote it.
        """
        store, path = creating(self.place), self._path(name)

        def work() -> bool:
            if store is None:
                if self.look(name) is not None:
                    return False
                self._put(name, [data], len(data))
                return True
            try:
                with store.open(path, "xb") as file:
                    file.write(data)
            except Exception:  # stores say in many ways that there is one
                if self.look(name) is None:
                    raise
                return False
            return True

        return self._attempt(name, "be written", work)

    def send(self, name: str, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            self._attempt(name, "be written", lambda: self._put(name, _pieces(file, size), size))

    def _put(self, name: str, pieces: Iterable[bytes], size: int) -> None:
        final, scheme = self._path(name), self.place.scheme
        folder, _, last = final.rpartition("/")
        path = final if scheme in ATOMIC else f"{folder}/{UNFINISHED}{secrets.token_hex(4)}-{last}"
        if scheme not in NO_FOLDERS:
            self._arrow.create_dir(folder, recursive=True)
        with self._arrow.open_output_stream(path) as stream:
            for piece in pieces:
                stream.write(piece)
        written = self._arrow.get_file_info(path).size
        if written != size:  # a read that failed in between still ends the object
            with suppress(Exception):
                self._arrow.delete_file(path)
            raise OSError(f"unexpected end: {written} of {size} bytes arrived")
        if path != final:
            self._arrow.move(path, final)

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if there is none."""
        with suppress(FileNotFoundError):
            self._attempt(name, "be removed", lambda: self._arrow.delete_file(self._path(name)), may_be_absent=True)


def _pieces(file: RawIOBase, size: int) -> Iterator[bytes]:
    file.seek(0)
    while size > 0:
        piece = file.read(min(PIECE, size))
        if not piece:
            raise OSError("unexpected end of the file")
        size -= len(piece)
        yield piece
