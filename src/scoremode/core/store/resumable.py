"""A result that is written over time: who may write it, whether it is finished, and what is left of it.

identity ─▶ other results and files of others are refused ─▶ lock ─▶ journal of finished parts ─▶ data ─▶ manifest

The first line of the journal has the identity of the result; each of its records is a finished part. The manifest has
the identity, hashes of the data, and a seal. With --fresh, a new journal replaces the old one before old files are
removed. So after a kill there is always a finished result, or a journal of the one that was being made.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from scoremode.core.cache.entries import cache_limit, is_cached, make_room, mark_used
from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import ABOUT, LOCK, Mark, give_another, own_files, remove_files
from scoremode.core.disk.locks import Lock
from scoremode.core.disk.manifests import differing_fields, is_manifest, read_sealed, write_sealed
from scoremode.core.disk.records import RecordFile, first_line, has_records, identity_in, is_record_file
from scoremode.errors import RunError, harmless

WAITING = "another process is scoring the same; waiting for it (Ctrl-C to stop)"

Finished = TypeVar("Finished")


class Resumable(Generic[Finished]):
    """Files of one result: inside a ``with`` block, the finished result, or else the right to write it.

    What is there and is not this result is never changed, unless it is another result and ``fresh`` is given.
    """

    what: ClassVar[str]  # such a folder, in words
    other: ClassVar[str]  # another result, in words, with the names of fields that differ
    replace: ClassVar[str] = "give another --out, or --fresh to replace it"
    again: ClassVar[str] = "score again with --fresh"
    form: ClassVar[type[msgspec.Struct]]  # of its manifest
    format: ClassVar[int] = 0
    header: ClassVar[Mapping[str, object]]  # the first line of its journal, which has the identity besides
    keeps_journal: ClassVar[bool] = False  # does a finished result keep its journal, because records may be added?
    manifest: str  # names of files
    journal: str

    def __init__(self, folder: Path, identity: Mapping[str, object], *, fresh: bool = False) -> None:
        self.folder, self.identity, self._fresh = folder, identity, fresh
        self.finished: Finished | None = None
        self._lock: Lock | None = None
        self._records: RecordFile | None = None

    def __enter__(self) -> Self:
        require_possible(self.folder)
        try:
            self.finished = self._take()
            if self.finished is not None:
                mark_used(self.folder)
        except BaseException:
            self.release()
            raise
        if self.finished is not None and not self.keeps_journal:
            self.release()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Close the journal and release the lock; does nothing if it is not held."""
        if self._records is not None:
            self._records.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────
    def _take(self) -> Finished | None:
        """Return the finished result; if there is none, take the lock and return None."""
        result, cached = None, is_cached(self.folder)
        if cached:
            cache_limit()  # raises if the limit is invalid, before anything is scored
        try:
            result = self._find()  # if it raises, nothing was created yet
        except RunError:
            if self.folder.exists() or not cached:
                raise  # else the cache removed the folder at the same time
        if result is None or (self.folder / self.journal).exists():
            self._lock = lock_folder(self.folder, waits=cached)
            result = self._find()  # again, because it may have changed before the lock
            if result is not None and not self.keeps_journal:
                self._remove_journal()  # a process was killed just before it did this
        return result

    def _find(self) -> Finished | None:
        """Return the finished result; None if this one may be written; RunError if it may not."""
        present = self._present()
        if self._fresh:
            return None
        path = self.folder / self.journal
        begun = identity_in(path)
        if self.manifest in present:
            try:
                manifest = self._read_manifest()
                self._require_same(manifest["identity"])
                return self._open(manifest)
            except RunError:
                if begun != self.identity or (self.keeps_journal and has_records(path)):
                    raise
                return None  # a process with --fresh was killed before it removed the old result
        if begun is not None and begun != self.identity and has_records(path):
            self._require_same(begun)
        if self.journal not in present and (lonely := self._data().keys() & present):
            raise RunError(f"{self.folder} contains {min(lonely)} without its manifest", fix=self.again)
        return None

    def _present(self) -> set[str]:
        """The names of the files that are there; RunError if one is not ours."""
        marks: dict[str, Mark] = {self.manifest: partial(is_manifest, form=self.form), self.journal: self._is_journal}
        return own_files(self.folder, self.what, marks | self._data())

    def _is_journal(self, path: Path) -> bool:
        return is_record_file(path, self.header)

    def _data(self) -> dict[str, Mark]:
        """Names of the files beside the manifest and the journal, and how each is recognized."""
        return {}

    def _read_manifest(self) -> Mapping[str, Any]:
        return read_sealed(self.folder / self.manifest, self.form, format=self.format, fix=self.again)

    def _open(self, manifest: Mapping[str, Any]) -> Finished:
        """Check and open the finished result; RunError if its data does not fit its manifest."""
        raise NotImplementedError

    def _require_same(self, identity: Mapping[str, object], where: object = None) -> None:
        if differing := differing_fields(identity, self.identity):
            raise RunError(
                f"{where or self.folder} contains {self.other.format(differing)}",
                fix=self.replace,
            )

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def begin(self, about: Mapping[str, str] | None = None) -> None:
        """Take over what is there. Call it when the model is ready: if it does not start, nothing is lost.

        The journal stays if it is this result's. ``about``: what the cache's list says of it until it is finished.
        """
        assert self._lock is not None, "there is no lock"
        self._present()  # raises if somebody put a file of their own there meanwhile
        fresh, self._fresh, path = self._fresh, False, self.folder / self.journal
        if fresh or identity_in(path) != self.identity:
            write_atomically(path, first_line(self._header()))
        if fresh or not self.keeps_journal:
            self._discard(fresh=fresh)
        if about is not None and is_cached(self.folder):
            write_atomically(self.folder / ABOUT, msgspec.json.encode(about))

    def _discard(self, *, fresh: bool) -> None:
        """Remove the files of another result, or of a result that is made again."""
        self._remove(self.manifest, *self._data())

    def _header(self) -> Mapping[str, object]:
        return {**self.header, "identity": self.identity}

    def open_journal(self) -> RecordFile:
        if self._records is not None:
            self._records.close()
        self._records = RecordFile(self.folder / self.journal, self._header())
        return self._records

    def _remove(self, *names: str) -> None:
        """Remove these files, and incomplete ones that a killed process left."""
        remove_files(self.folder, names)

    def _remove_journal(self) -> None:
        self._remove(self.journal)

    def finish(self, manifest: Mapping[str, object]) -> Mapping[str, Any]:
        """Write the manifest, when all data is there; then remove the journal."""
        whole = write_sealed(self.folder / self.manifest, manifest, self.form)
        if not self.keeps_journal:
            self._remove_journal()
        if is_cached(self.folder):
            self._remove(ABOUT)
        make_room(self.folder)
        return whole


def lock_folder(folder: Path, *, waits: bool, name: str | None = None) -> Lock:
    """Lock a folder, which is created if needed. ``name`` is what the user calls the folder."""
    lock = Lock(folder / LOCK)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder} cannot be created ({error.strerror})", fix=give_another(folder)) from None
        try:
            if lock.acquire(waiting=WAITING if waits else None):
                return lock
        except RunError:
            if folder.exists() or not is_cached(folder):
                raise
            continue  # the cache removed the folder before we had the lock
        raise RunError(f"another process is scoring into {name or folder}", fix="wait for it, or give another --out")


def require_possible(folder: Path) -> None:
    """Raise RunError if there can be no folder at this path."""
    try:
        is_file = not stat.S_ISDIR(os.stat(folder).st_mode)
    except FileNotFoundError:
        return
    except (OSError, ValueError):  # also NUL and half a surrogate pair
        raise RunError(f"{harmless(str(folder))} cannot be a folder", fix=give_another(folder)) from None
    if is_file:
        raise RunError(f"{folder} is a file", fix="give a folder to --out")
