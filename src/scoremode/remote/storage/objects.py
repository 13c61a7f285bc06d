"""The files of a place: listed, read, written whole, removed. Operations that may still work are tried again.

An object has its name only when it is complete: object stores work that way; elsewhere it is written under another
name first. Files are sent and fetched in pieces, so memory does not grow with them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

from scoremode.core.arguments import SERVERS, seconds_in
from scoremode.core.disk.uri import RemotePath
from scoremode.errors import StorageError, one_line
from scoremode.remote.storage.file_systems import (
    ADDRESS,
    BY_ARROW,
    UNREACHABLE,
    creating,
    file_system,
    reason_of,
    refusal,
)
from scoremode.remote.storage.hub import is_missing_file

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
VERSIONS = ("mtime", "created", "ETag", "etag", "sha256", "oid", "blob_id", "LastModified", "Last-Modified")


def patience() -> float:
    """Seconds for which failing requests are tried again: ``$SCOREMODE_STORAGE_PATIENCE``."""
    return seconds_in(PATIENCE, 60.0, 0.0, "one, as in 60")


@dataclass(frozen=True, slots=True)
class Found:
    name: str  # relative to the place that was listed
    size: int
    is_folder: bool


class Objects:
    """The files in a folder elsewhere, by names relative to it. ``Objects(place)`` asks nothing of a server yet."""

    def __init__(self, place: RemotePath) -> None:
        self.place, self._seconds = place, patience()  # for which a failing request is tried again
        if place.scheme == "hf":
            self._seconds = min(self._seconds, HUB_SECONDS)
        self._fs = file_system(place)

    def _path(self, name: str) -> str:
        scheme, inner = self.place.scheme, self.place.path
        if scheme in ("hdfs", "viewfs"):
            inner = "/" + inner.partition("/")[2]
        elif scheme not in BY_ARROW:
            inner = str(self._fs._strip_protocol(f"{scheme}://{inner}"))  # without the host, unless it is http
        return f"{inner}/{name}" if name else inner

    def _place(self, name: str) -> RemotePath:
        return self.place / name if name else self.place

    def _attempt(self, name: str, doing: str, work: Callable[[], T], *, may_be_absent: bool = False) -> T:
        """The result of ``work``, which is called again after errors that may pass; StorageError after others.

        If the file ``may_be_absent``, FileNotFoundError is passed on.
        """
        began, pause, server = time.monotonic(), FIRST_PAUSE, (self.place.scheme, self.place.root)
        while True:
            try:
                self._fs.invalidate_cache()  # others may have changed something
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

    def _if_there(self, name: str, doing: str, work: Callable[[], T]) -> T | None:
        """The result of ``work``; None if there is no such file."""
        with suppress(FileNotFoundError):
            return self._attempt(name, doing, work, may_be_absent=True)
        return None

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def listed(self, *, deep: bool = False) -> list[Found]:
        """The files in the folder, sorted by name; none if there is no such folder."""
        path = self._path("")
        found = self._if_there("", "be listed", lambda: list(self._entries(path, deep=deep))) or []
        return sorted((_found(one, one["name"][len(path) :].lstrip("/")) for one in found), key=lambda one: one.name)

    def _entries(self, path: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        # not fsspec's own walk, which leaves out folders that it cannot read
        for one in self._fs.ls(path, detail=True):
            if one["name"].rstrip("/") != path:
                yield one
                if deep and one["type"] == "directory":
                    yield from self._entries(one["name"], deep=True)

    def look(self, name: str = "") -> Found | None:
        """The file or folder of that name; None if there is none."""
        about = self._if_there(name, "be read", lambda: self._info(name))
        return None if about is None else _found(about, name)

    def version(self, name: str = "") -> str | None:
        """Everything that a server tells about a file's content without sending it; None if there is no such file."""

        def work() -> dict[str, Any]:
            about = self._info(name)
            if self.place.scheme in BY_ARROW and about["type"] != "directory":
                with self._fs.open(self._path(name)) as file:
                    about["ETag"] = sorted((file.stream.metadata() or {}).items())
            return about

        about = self._if_there(name, "be read", work)
        if about is None or about["type"] == "directory":
            return None
        return f"{about['size'] or 0}|{[str(about.get(key)) for key in VERSIONS]}"

    def _info(self, name: str) -> dict[str, Any]:
        """What is known of a file. Over HTTP, fsspec calls every file missing that it cannot read: see why."""
        try:
            return dict(self._fs.info(self._path(name)))
        except FileNotFoundError as error:
            cause = error.__cause__
            status = getattr(cause, "status", None)
            if self.place.scheme not in SERVERS or cause is None or status in (404, 410):
                raise
            if status is not None:
                raise OSError(f"HTTP status {status}") from None  # some of them pass
            why = one_line(str(cause))[:200] or type(cause).__name__
            raise StorageError(
                f"{self._place(name)} cannot be read: the server does not answer ({why})", fix=ADDRESS
            ) from None

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, name: str, *, most: int) -> bytes | None:
        """The content of a small file, at most ``most`` bytes of it; None if there is no such file."""

        def work() -> bytes:
            with self._fs.open(self._path(name)) as file:
                return bytes(file.read(most))

        return self._if_there(name, "be read", work)

    def _pieces(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        """The bytes of a file from ``begin`` to ``end``, in pieces. If the connection breaks, a piece is read again."""
        source: Any | None = None

        def work() -> bytes:
            nonlocal source
            try:
                if source is None:
                    source = self._fs.open(self._path(name))
                    source.seek(begin)
                data = bytes(source.read(min(PIECE, end - begin)))
            except Exception:
                source = None
                raise
            if not data:
                source = None
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
            for piece in self._pieces(name, file.tell(), size):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, name: str, data: bytes) -> None:
        self._attempt(name, "be written", lambda: self._put(name, BytesIO(data)))

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one of that name; return whether it was written.

        Without a conditional write of the store, two processes at once may both be told that they wrote it.
        """
        store, path = creating(self.place), self._path(name)

        def work() -> bool:
            if store is None:
                if self.look(name) is not None:
                    return False
                self._put(name, BytesIO(data))
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
            self._attempt(name, "be written", lambda: self._put(name, file))

    def _put(self, name: str, file: IO[bytes]) -> None:
        size, final, scheme = file.seek(0, os.SEEK_END), self._path(name), self.place.scheme
        folder, _, last = final.rpartition("/")
        path = final if scheme in ATOMIC else f"{folder}/{UNFINISHED}{secrets.token_hex(4)}-{last}"
        if scheme not in NO_FOLDERS:
            self._fs.makedirs(folder, exist_ok=True)
        with self._fs.open(path, "wb") as stream:
            file.seek(0)
            shutil.copyfileobj(file, stream, PIECE)
        self._fs.invalidate_cache()
        written = self._fs.info(path)["size"]
        if written != size:  # a read that failed in between still ends the object
            with suppress(Exception):
                self._fs.rm_file(path)
            raise OSError(f"unexpected end: {written} of {size} bytes arrived")
        if path != final:
            self._fs.mv(path, final)

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if there is none."""
        self._if_there(name, "be removed", lambda: self._fs.rm_file(self._path(name)))


def _found(about: dict[str, Any], name: str) -> Found:
    return Found(name.rstrip("/"), about["size"] or 0, about["type"] == "directory")
