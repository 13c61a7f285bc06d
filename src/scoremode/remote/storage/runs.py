"""Runs and references behind a URI: made in a work folder here, and sent when they are complete.

URI/lock.json                who is writing: the id of the work folder, the host, the process, and since when
URI/states-….safetensors     of a reference: its files
URI/scores.parquet           one row per target
URI/manifest.json            sent last: if it is there, the run is complete

The work folder lies in the cache and is named after the URI; it is an ordinary run folder (runs.py), in which the same
command resumes. What a run replaces stays until the new run is complete: then the old manifest is removed first. While
the URI has our lock, the work folder counts, and not what lies there: an upload that was cut is begun again.

The store creates the lock only if there is none. A process that was killed leaves it: the same command on the same
machine finds the id of its work folder in it, and goes on. A user who knows that the writer died deletes the object.

In a repository of the Hugging Face hub, each change is a commit. Other files of the repository are never touched.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from scoremode.core.arguments import SERVERS
from scoremode.core.cache.entries import cache_limit
from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import (
    JOURNAL,
    LOCK,
    MANIFEST,
    PLACE,
    REFERENCE,
    SCORES,
    cache_folder,
    is_reference_file,
)
from scoremode.core.disk.manifests import has_form
from scoremode.core.disk.records import identity_in
from scoremode.core.disk.uri import RemotePath
from scoremode.core.reading import read_file
from scoremode.core.store import runs
from scoremode.core.store.run import Run, RunManifest
from scoremode.core.strict_json import parse
from scoremode.errors import InputError, RunError, StorageError, alias_path, harmless, print_line
from scoremode.remote.storage.copies import LOCK_OBJECT, copy_folder, files_in, present_files, read_manifests
from scoremode.remote.storage.objects import CONDITIONAL, Objects

STAYS = "what was scored is kept on this machine: run the same command again, without --fresh, to send it"


# ── the lock ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Holder(msgspec.Struct, frozen=True):
    """The content of a lock, and of the note in the work folder. If it cannot be read, the defaults count."""

    id: str = ""  # of the work folder
    host: str = "an unknown machine"
    process: int = 0
    since: str = "an unknown time"

    @staticmethod
    def read(data: bytes) -> Holder:
        try:
            return msgspec.json.decode(data, type=Holder)
        except (msgspec.MsgspecError, RecursionError):
            return Holder()


class RemoteLock:
    """The right to write a place, from ``acquire`` to ``release``. The work folder must be locked."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects, self._note, self._is_held = objects, folder / PLACE, False
        self.stays = False  # with an upload that was cut

    def _id(self) -> str:
        """The id of the work folder; empty if it has none yet."""
        return Holder.read(read_file(self._note)).id if self._note.exists() else ""

    def _holder(self) -> Holder | None:
        """Who holds the lock; None if nobody does."""
        data = self._objects.read(LOCK_OBJECT, most=1 << 16)
        return None if data is None else Holder.read(data)

    def is_ours(self) -> bool:
        """Was the lock left by a process that had the same work folder?"""
        holder = self._holder() if self._id() else None
        return holder is not None and holder.id == self._id()

    def acquire(self) -> None:
        """Take the lock; RunError if another one holds it."""
        mine, place = self._id() or secrets.token_hex(8), self._objects.place
        write_atomically(self._note, msgspec.json.encode(Holder(mine)))
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        data = msgspec.json.encode(Holder(mine, socket.gethostname(), os.getpid(), now))
        if not self._objects.create(LOCK_OBJECT, data):
            holder = self._holder() or Holder()
            if holder.id != mine:
                raise RunError(
                    f"process {holder.process} on {harmless(holder.host)[:80]} has been writing into {place} since "
                    f"{harmless(holder.since)[:40]}",
                    fix=f"wait for it; if it died, delete {place / LOCK_OBJECT}",
                )
            self._objects.write(LOCK_OBJECT, data)
        self._is_held = True
        if place.scheme not in CONDITIONAL:
            print_line(f"scoremode: nobody keeps two writers of {place} apart that begin at once")

    def release(self) -> None:
        """Remove the lock; does nothing if it is not held, or if it ``stays``."""
        if self._is_held and not self.stays:
            with suppress(StorageError):  # the same command recognizes it
                self._objects.remove(LOCK_OBJECT)
        self._is_held = False


# ── the claim ────────────────────────────────────────────────────────────────────────────────────────────────────────
class RemoteClaim(runs.Claim):
    """A folder behind a URI for one run: gives its finished run, or else the right to write there, and a work folder.

    A folder that is not a run's is never changed.
    """

    def __init__(self, place: RemotePath, identity: dict[str, Any], *, fresh: bool = False, kind: str = "runs") -> None:
        if place.scheme in SERVERS:
            raise InputError(f"{place} cannot be written: a server of files is only read", fix="give another --out")
        work = hashlib.sha256(f"work for {place}".encode()).hexdigest()[:20]
        super().__init__(cache_folder() / kind / work, identity, fresh=fresh)
        self.place = place
        self._objects = Objects(place)
        self._remote_lock = RemoteLock(self._objects, self.folder)
        self._replaces, self._goes_on = fresh, False
        self._old_files: set[str] = set()  # that are replaced by this run's
        self._is_complete = False

    # ── take ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _take(self) -> Run | None:
        """Return the finished run behind the URI; if there is none, take the right to write there and return None."""
        cache_limit()  # raises if the limit is invalid, before anything is scored
        self._lock = runs.lock_folder(self.folder, waits=False, name=str(self.place))
        alias_path(str(self.folder), str(self.place))
        self._goes_on = self._is_left_here()
        if (run := self._published()) is not None:
            return run
        self._remote_lock.acquire()
        run = self._published()  # again, because it may have changed meanwhile
        if run is None:
            run = self._find()
            if run is not None:  # it was not sent, or not all of it
                if (self.folder / REFERENCE).exists():
                    super().check_reference()
                run = self.publish(run)
        return run

    def _published(self) -> Run | None:
        """The finished run behind the URI; None if this run may be scored; RunError if it may not."""
        place, objects = self.place, self._objects
        listed = {name for name in objects.listed() if not name.startswith(".")}
        files = {name for name in listed if name in (MANIFEST, SCORES) or is_reference_file(name)}
        others = listed - files - {LOCK_OBJECT} if place.scheme != "hf" else set()  # a repository has a card and more
        self._old_files = files
        if not listed and objects.is_folder() is False:
            raise RunError(f"{place} is a file", fix="give a folder to --out")
        if self._goes_on:
            return None
        identity = _identity_in(read_manifests(objects).get(MANIFEST, b"")) if MANIFEST in files else None
        if identity is None and files | others:
            raise RunError(
                f"{place} is not a run: it contains {harmless(min(others or files))}",
                fix="give a new or empty folder to --out",
            )
        if identity is None or self._replaces:
            return None
        self._require_same(identity, place)
        return replace(runs.load(place), cached=True)

    def _is_left_here(self) -> bool:
        """Was a process killed here, or its upload cut, that was writing this run, or one that is replaced now?"""
        if not self._remote_lock.is_ours():
            return False
        begun = identity_in(self.folder / JOURNAL)
        return self._replaces or self.identity in (begun, _identity_in(self._manifests().get(MANIFEST, b"")))

    def check_reference(self) -> None:
        """Raise StorageError if a file is missing; the content of files is checked when they are fetched."""
        present_files(self._objects, read_manifests(self._objects))

    # ── publish ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def publish(self, run: Run) -> Run:
        """Send the files of the finished run, its manifests last, and remove those of the run that it replaces."""
        names = [*files_in(self._manifests(), self.place), *self._manifests()]
        old = sorted(self._old_files.difference(names))
        try:
            self._send(names, old)
        except StorageError as error:
            raise StorageError(f"the run is complete, but {error.message}", fix=f"{error.fix}; {STAYS}") from None
        self._is_complete = True
        return replace(run, path=str(self.place))

    def _send(self, names: list[str], old: list[str]) -> None:
        self._remote_lock.stays = True
        for name in (*self._old_files & {MANIFEST}, *old):
            self._objects.remove(name)
        for name in names:
            self._objects.send(name, self.folder / name)
        self._remote_lock.stays = False

    def _manifests(self) -> dict[str, bytes]:
        return {n: (self.folder / n).read_bytes() for n in (REFERENCE, MANIFEST) if (self.folder / n).exists()}

    def release(self) -> None:
        if self._lock is not None:
            self._remote_lock.release()
            if self._is_complete:
                self._become_copy()
        super().release()

    def _become_copy(self) -> None:
        """Give the work folder the name of a copy, so that its files are not fetched when the run is read here."""
        copy, self._is_complete = copy_folder(self._manifests()), False
        (self.folder / PLACE).unlink(missing_ok=True)
        try:
            os.rename(self.folder, copy)
            (copy / LOCK).unlink(missing_ok=True)
        except OSError:  # there is a copy already
            shutil.rmtree(self.folder, ignore_errors=True)


def _identity_in(data: bytes) -> dict[str, Any] | None:
    """The identity in the manifest of a run; None if it cannot be read, or if it is not one of ours."""
    try:
        manifest = parse(data)
    except ValueError:
        return None
    return manifest["identity"] if has_form(manifest, RunManifest) else None
