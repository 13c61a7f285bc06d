"""The files of a place: listed, read, written whole, removed. What may pass is tried again for a while.

An object has its name only when it is complete: object stores work that way; elsewhere it is written under another
name first. Files are sent and fetched in pieces, so memory does not grow with them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from scoremode.errors import OptionError, StorageError, one_line
from scoremode.places.explain import ADDRESS, reason_of, refusal
from scoremode.places.file_systems import FileSystem, file_system
from scoremode.places.uri import SERVERS, Place

T = TypeVar("T")

PATIENCE = 60.0  # seconds for which an operation that may still work is tried again
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds between two attempts
PIECE = 4 << 20  # bytes that are read or written at once
UNFINISHED = ".scoremode-unfinished-"


@dataclass(frozen=True, slots=True)
class Found:
    """A file or folder that is there."""

    name: str  # relative to the place that was listed
    size: int
    modified: float | None  # seconds since 1970, by the server's clock
    is_folder: bool = False


def patience() -> float:
    """Seconds for which what fails is tried again: ``$SCOREMODE_STORAGE_PATIENCE``."""
    given = os.environ.get("SCOREMODE_STORAGE_PATIENCE", "").strip()
    try:
        seconds = float(given) if given else PATIENCE
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise OptionError("SCOREMODE_STORAGE_PATIENCE is not a number of seconds", fix="give one, as in 60")
    return seconds


class Objects:
    """What lies in a folder elsewhere, by names relative to it. ``Objects(place)`` asks nothing of a server yet."""

    def __init__(self, place: Place, *, seconds: float | None = None) -> None:
        """``seconds``: how long what fails is tried again, if not as long as usual."""
        self.place = place
        self._seconds = patience() if seconds is None else seconds
        self._system: FileSystem = file_system(place)

    @property
    def writes_are_costly(self) -> bool:
        return self._system.writes_are_costly

    def _path(self, name: str) -> str:
        system, place = self._system, self.place
        if system.scheme in SERVERS:
            return f"{system.scheme}://{place.path}" + (f"/{name}" if name else "")
        inner = place.path
        if system.fsspec is None and system.scheme in ("hdfs", "viewfs"):
            inner = "/" + inner.partition("/")[2]
        elif system.fsspec is not None:
            inner = str(system.fsspec._strip_protocol(f"{system.scheme}://{inner}"))  # without the host
        return f"{inner}/{name}" if name else inner

    def _attempt(self, name: str, doing: str, work: Callable[[], T]) -> T:
        """Do it, again if it may pass; StorageError if it stays impossible."""
        deadline, pause = time.monotonic() + self._seconds, FIRST_PAUSE
        while True:
            try:
                return work()
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system of fsspec raises its own kinds
                if isinstance(error, StorageError) or not reason_of(error).may_pass:
                    raise refusal(self._place(name), doing, error) from None
                if time.monotonic() + pause > deadline:
                    raise refusal(self._place(name), doing, error) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _place(self, name: str) -> Place:
        return self.place / name if name else self.place

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def listed(self, folder: str = "", *, deep: bool = False) -> list[Found]:
        """The files in a folder, sorted by name; none if there is no such folder."""
        from pyarrow import fs

        before = self._path(folder)
        selector = fs.FileSelector(before, recursive=deep, allow_not_found=True)
        found = self._attempt(folder, "be listed", lambda: self._system.arrow.get_file_info(selector))
        below = [(info, info.path[len(before) :].lstrip("/")) for info in found]
        return sorted((self._found(info, name) for info, name in below if name), key=lambda one: one.name)

    def look(self, name: str = "") -> Found | None:
        """The file or folder of that name; None if there is none."""
        info = self._attempt(name, "be read", lambda: self._about(name))
        return self._found(info, name) if info.type.name != "NotFound" else None

    def _about(self, name: str) -> Any:
        info = self._system.arrow.get_file_info(self._path(name))
        if info.type.name == "NotFound" and self._system.scheme in SERVERS:
            self._require_absence(name)
        return info

    def _require_absence(self, name: str) -> None:
        """fsspec says of every file that it cannot read over HTTP that there is none. Ask why."""
        try:
            assert self._system.fsspec is not None
            self._system.fsspec.info(self._path(name))
        except FileNotFoundError as error:
            cause = error.__cause__
            status = getattr(cause, "status", None)
            if cause is None or status in (404, 410):
                return
            if status is not None:
                raise OSError(f"HTTP status {status}") from None  # some of them pass
            why = one_line(str(cause))[:200] or type(cause).__name__
            raise StorageError(
                f"{self._place(name)} cannot be read: the server does not answer ({why})",
                fix=ADDRESS,
            ) from None

    def _found(self, info: Any, name: str) -> Found:
        modified = info.mtime.timestamp() if info.mtime is not None else None
        if modified is None and self._system.fsspec is not None and info.type.name == "File":
            with suppress(Exception):  # not every file system knows it
                modified = _seconds(self._system.fsspec.modified(info.path))
        return Found(name, info.size or 0, modified, is_folder=info.type.name == "Directory")

    def version(self, name: str = "") -> str | None:
        """Everything that a server tells about a file's content without sending it; None if there is no such file."""
        found = self.look(name)
        if found is None or found.is_folder:
            return None
        marks = self._attempt(name, "be read", lambda: self._marks(self._path(name)))
        return f"{found.size}|{found.modified}|{marks}"

    def _marks(self, path: str) -> list[str]:
        if self._system.fsspec is not None:
            about = self._system.fsspec.info(path)
            return [str(about.get(key)) for key in ("ETag", "etag", "sha256", "oid", "blob_id", "LastModified")]
        with self._system.arrow.open_input_file(path) as file:
            return sorted(f"{key}={value!r}" for key, value in (file.metadata() or {}).items())

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, name: str, *, most: int) -> bytes | None:
        """A small file, up to ``most`` bytes of it; None if there is none."""

        def work() -> bytes:
            with self._system.arrow.open_input_stream(self._path(name)) as stream:
                return bytes(stream.read(most))

        try:
            return self._attempt(name, "be read", work)
        except FileNotFoundError:
            return None

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        """Some bytes of a file."""

        def work() -> bytes:
            with self._system.arrow.open_input_file(self._path(name)) as source:
                data = bytes(source.read_at(size, offset))
            if len(data) != size:
                raise OSError("unexpected end of the file")
            return data

        try:
            return self._attempt(name, "be read", work)
        except FileNotFoundError as error:
            raise refusal(self._place(name), "be read", error) from None

    def sha256(self, name: str) -> str:
        """The hash of what lies there now: all of it is read."""

        def work() -> str:
            hasher = hashlib.sha256()
            with self._system.arrow.open_input_stream(self._path(name)) as stream:
                while piece := stream.read(PIECE):
                    hasher.update(piece)
            return hasher.hexdigest()

        try:
            return self._attempt(name, "be read", work)
        except FileNotFoundError as error:
            raise refusal(self._place(name), "be read", error) from None

    def fetch(self, name: str, to: Path, *, size: int, told: Callable[[int], None] | None = None) -> None:
        """Append to ``to`` what it lacks of a file of this size. A cut connection goes on where it was cut.

        The caller checks what was fetched: it may have been changed at the other end meanwhile.
        """
        deadline = time.monotonic() + self._seconds
        while True:
            before = to.stat().st_size if to.exists() else 0
            try:
                self._fetch_rest(name, to, before, size, told)
                return
            except FileNotFoundError:
                raise refusal(self._place(name), "be read", FileNotFoundError()) from None
            except StorageError:
                raise
            except Exception as error:
                if to.exists() and to.stat().st_size > before:
                    deadline = time.monotonic() + self._seconds  # it moves
                if not reason_of(error).may_pass or time.monotonic() > deadline:
                    raise refusal(self._place(name), "be read", error) from None
                time.sleep(min(1.0, self._seconds / 10))

    def _fetch_rest(self, name: str, to: Path, begin: int, size: int, told: Callable[[int], None] | None) -> None:
        with self._system.arrow.open_input_file(self._path(name)) as source, to.open("ab") as file:
            found = source.size()
            if found != size:
                raise StorageError(
                    f"{self._place(name)} has {found} bytes instead of {size}", fix="it was changed: try again"
                )
            while begin < size:
                piece = source.read_at(min(PIECE, size - begin), begin)
                if not piece:
                    raise OSError("unexpected end of the file")
                file.write(piece)
                begin += len(piece)
                if told:
                    told(begin)
            file.flush()
            os.fsync(file.fileno())

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole."""
        self._attempt(name, "be written", lambda: self._put(name, iter([data]), len(data)))

    def send(self, name: str, path: Path, begin: int = 0, end: int | None = None) -> None:
        """Write a file of this machine, or some of its bytes, whole."""
        size = (path.stat().st_size if end is None else end) - begin
        self._attempt(name, "be written", lambda: self._put(name, _pieces(path, begin, size), size))

    def _put(self, name: str, pieces: Iterator[bytes], size: int) -> None:
        arrow, final = self._system.arrow, self._path(name)
        path = final if self._system.is_atomic else self._beside(final)
        if self._system.has_folders and not self._system.writes_are_costly:
            arrow.create_dir(final.rpartition("/")[0], recursive=True)
        with arrow.open_output_stream(path) as stream:
            for piece in pieces:
                stream.write(piece)
        written = arrow.get_file_info(path).size
        if written != size:  # a read that failed in between still ends the object
            with suppress(Exception):
                arrow.delete_file(path)
            raise OSError(f"unexpected end: {written} of {size} bytes arrived")
        if path != final:
            arrow.move(path, final)

    @staticmethod
    def _beside(path: str) -> str:
        folder, _, name = path.rpartition("/")
        return f"{folder}/{UNFINISHED}{secrets.token_hex(4)}-{name}"

    # ── remove ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def remove(self, name: str) -> None:
        """Remove a file; does nothing if there is none."""
        with suppress(FileNotFoundError):
            self._attempt(name, "be removed", lambda: self._system.arrow.delete_file(self._path(name)))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and everything in it; does nothing if there is none."""
        with suppress(FileNotFoundError):
            self._attempt(name, "be removed", lambda: self._system.arrow.delete_dir(self._path(name)))


def _pieces(path: Path, begin: int, size: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while size > 0:
            piece = file.read(min(PIECE, size))
            if not piece:
                raise OSError(f"unexpected end of {path}")
            size -= len(piece)
            yield piece


def _seconds(modified: datetime) -> float:
    """Times without a zone are in UTC, by the conventions of fsspec."""
    return (modified if modified.tzinfo is not None else modified.replace(tzinfo=UTC)).timestamp()
