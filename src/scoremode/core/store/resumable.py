"""A folder for one result: which process may write into it, whether the result is finished, and what is left of it.

Finished parts are records of a journal, whose first line has the identity of the result. Files are written in this
order: journal, columns, manifest with a seal. With --fresh, a new journal replaces the old one before old files are
removed. So after a kill the folder always contains a finished result, or a journal of the one that was being made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from scoremode.core.cache.entries import is_cached
from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import LOCK, TEMPORARY, Mark, give_another, own_files
from scoremode.core.disk.locks import Lock
from scoremode.core.disk.manifests import differing_fields, is_manifest, sealed
from scoremode.core.disk.records import RecordFile, is_record_file, read_record_header
from scoremode.errors import RunError, harmless, readable

WAITING = "another process is scoring the same; waiting for it (Ctrl-C to stop)"
FIRST_BYTES = 4096

Finished = TypeVar("Finished")


class ResumableFolder(Generic[Finished]):
    """A folder for one result: inside a ``with`` block, the finished result, or else the right to write there.

    A folder that contains something else is never changed, unless it is another result and ``fresh`` is given.
    """

    kind: ClassVar[str]  # in the first line of the journal
    what: ClassVar[str]  # such a folder, in words
    manifest: ClassVar[str]  # names of files
    journal: ClassVar[str]
    others: ClassVar[Mapping[str, Mark]] = {}
    other: ClassVar[str]  # another result, in words, with the names of fields that differ
    replace: ClassVar[str] = "give another --out, or --fresh to replace it"
    again: ClassVar[str] = "score again with --fresh"

    def __init__(self, folder: Path, identity: dict[str, Any], *, fresh: bool = False) -> None:
        self.folder, self.identity, self._fresh = folder, identity, fresh
        self.finished: Finished | None = None
        self._lock: Lock | None = None
        self._records: RecordFile | None = None

    def __enter__(self) -> Self:
        require_possible(self.folder)
        try:
            self.finished = self._take()
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Close the journal and release the folder's lock; does nothing if it is not held."""
        if self._records is not None:
            self._records.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take(self) -> Finished | None:
        """Lock the folder and return its finished result; None if it has none."""
        self._finished_manifest()  # raises before a folder is made
        self._lock, _ = lock_folder(self.folder, waits=is_cached(self.folder))
        found = self._finished_manifest()
        return None if found is None else self._open(found)

    def _open(self, manifest: dict[str, Any]) -> Finished:
        raise NotImplementedError

    def _read_manifest(self) -> dict[str, Any]:
        raise NotImplementedError

    def _finished_manifest(self) -> dict[str, Any] | None:
        """Refuse a folder with anything else in it; return the manifest if this result is finished."""
        begins = json.dumps({"for": self.kind}).encode()[:-1]
        marks = {self.manifest: is_manifest, **self.others, self.journal: lambda path: is_record_file(path, begins)}
        present = own_files(self.folder, self.what, marks, {self.manifest, *self.others})
        if self._fresh:
            return None
        begun = self._identity_of_journal() if self.journal in present else None
        if self.manifest in present:
            found = self._read_manifest()
            if found["identity"] == self.identity or begun != self.identity:  # else --fresh was killed
                self._require_same(found["identity"])
                return found
        elif begun is not None:
            self._require_same(begun)
        elif lonely := self.others.keys() & present:
            raise RunError(f"{self.folder} contains {min(lonely)} without its manifest", fix=self.again)
        return None

    def _identity_of_journal(self) -> dict[str, Any] | None:
        """Return the identity in the journal; None if a kill left less than its first line."""
        path = self.folder / self.journal
        identity = (read_record_header(path) or {}).get("identity")
        if isinstance(identity, dict):
            return identity
        if self._first_line().startswith(path.read_bytes()[:FIRST_BYTES]):
            return None
        raise RunError(f"{path} is damaged: its first line cannot be read", fix=self.again)

    def _require_same(self, known: dict[str, Any]) -> None:
        if differing := differing_fields(known, self.identity):
            raise RunError(f"{self.folder} contains {self.other.format(differing)}", fix=self.replace)

    def _header(self) -> dict[str, Any]:
        return {"for": self.kind, "identity": self.identity}

    def _first_line(self) -> bytes:
        return json.dumps(self._header(), sort_keys=True, allow_nan=False).encode() + b"\n"

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _open_journal(self) -> RecordFile:
        """Take the folder over: open the journal, and remove the files of another result."""
        path = self.folder / self.journal
        if self._fresh:
            write_atomically(path, self._first_line())
        self._remove(self.manifest, *self.others)
        self._records = RecordFile(path, self._header())
        return self._records

    def _remove(self, *names: str) -> None:
        """Remove these files, and incomplete ones that a killed process left."""
        for path in (*(self.folder / name for name in names), *self.folder.glob(TEMPORARY)):
            path.unlink(missing_ok=True)

    def _write_manifest(self, content: dict[str, Any]) -> dict[str, Any]:
        whole = sealed_as_read(content)
        write_atomically(self.folder / self.manifest, json.dumps(whole, indent=1).encode())
        return whole


def sealed_as_read(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with its seal, as it will be read from its file: tuples are lists."""
    return sealed(json.loads(readable(json.dumps(manifest, ensure_ascii=False, allow_nan=False))))


def lock_folder(folder: Path, *, waits: bool, name: str | None = None) -> tuple[Lock, bool]:
    """Lock a folder, which is created if needed; return the lock, and whether another process held it first.

    ``name`` is what the user calls the folder.
    """
    lock = Lock(folder / LOCK)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder} cannot be created ({error.strerror})", fix=give_another(folder)) from None
        try:
            if lock.acquire(waiting=WAITING if waits else None):
                return lock, lock.has_waited
        except RunError:
            if folder.exists() or not is_cached(folder):
                raise
            continue  # the cache removed the folder before we had the lock
        raise RunError(f"another process is scoring into {name or folder}", fix="wait for it, or give another --out")


def require_possible(folder: Path) -> None:
    """Raise RunError if there can be no folder at this path."""
    try:
        if "\0" in str(folder):
            raise RunError(f"{harmless(str(folder))} contains NUL", fix=give_another(folder))
        os.fsencode(folder)
        is_file = folder.exists() and not folder.is_dir()
    except UnicodeEncodeError:
        raise RunError(f"{harmless(str(folder))} cannot be a file's name", fix=give_another(folder)) from None
    except OSError as error:
        raise RunError(f"{harmless(str(folder))} cannot be read ({error.strerror})", fix=give_another(folder)) from None
    if is_file:
        raise RunError(f"{folder} is a file", fix="give a folder to --out")
