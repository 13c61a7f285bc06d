"""Runs and references in a folder elsewhere, behind a URI: made in a work folder here, sent while they are scored.

URI/writer-….json     which process is writing (remote/lease.py)
URI/partial/WRITER/…  while scoring: the journal, in pieces (remote/writer.py)
URI/states-….safetensors   of a reference: each shard as soon as it is complete
URI/scores.parquet    one row per target
URI/manifest.json     written last: if it is there, the run is complete

The work folder lies in the cache and is named after the URI; it is an ordinary run folder (runs.py). Another machine
has none: it makes one from the pieces. Files are sent in this order: pieces, columns, manifest; then the pieces are
removed. With --fresh, a new journal is sent; then the old run's manifest is removed, then its columns, then a
reference's files. So after a kill the folder elsewhere always contains a complete run, or pieces of the run that is
being scored.

In a repository of the Hugging Face hub, nothing is published before the run is complete. Then all files are added, and
those of a run that is replaced are removed, in a single commit that must follow the commit seen before. Other files of
the repository are never touched.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from scoremode.arguments import SERVERS
from scoremode.cache.eviction import cache_limit
from scoremode.disk.folders import (
    JOURNAL,
    LOCK,
    MANIFEST,
    PARTIAL,
    PLACE,
    REFERENCE,
    ROWS,
    SCORES,
    cache_folder,
    is_reference_file,
)
from scoremode.disk.records import LONGEST_HEADER
from scoremode.errors import InputError, RunError, StorageError, harmless, print_line
from scoremode.remote.hub import ConflictError, Repository, is_repository
from scoremode.remote.lease import FLAG
from scoremode.remote.objects import Objects, patience
from scoremode.remote.uri import Place
from scoremode.remote.writer import FIRST_CONTACT, PARTIAL_FOLDER, RemoteWriter, SentJournals
from scoremode.scores import journal
from scoremode.store import runs
from scoremode.store.remote_copies import copy_folder, files_in, present_files, read_manifests
from scoremode.store.run import Run
from scoremode.strict_json import parse

STAYS = "what was scored is kept on this machine: run the same command again to send it"
ATTEMPTS = 5  # to commit, while others commit to the same repository of the hub


class PlaceClaim(runs.Claim):
    """A folder behind a URI for one run, and its work folder in the cache."""

    def __init__(self, place: Place, identity: dict[str, Any], *, fresh: bool = False, kind: str = "runs") -> None:
        if place.scheme in SERVERS:
            raise InputError(f"{place} cannot be written: a server of files is only read", fix="give another --out")
        work = hashlib.sha256(f"work for {place}".encode()).hexdigest()[:20]
        super().__init__(cache_folder() / kind / work, identity, fresh=fresh)
        self.place = place
        self._objects = Objects(place, seconds=min(FIRST_CONTACT, patience()))
        self._old_files: set[str] = set()  # that are replaced by this run's
        self._is_complete = False

    def _take(self) -> Run | None:
        """Return the finished run behind the URI; if there is none, take the right to write there and return None."""
        cache_limit()  # raises if the limit is invalid, before anything is scored
        found = self._existing_run()  # raises before anything is written
        if found is None:
            self._lock, _ = runs.lock_folder(self.folder, waits=False, name=str(self.place))
            self._take_place()
            found = self._existing_run() or self._prepare()  # again, because it may have changed meanwhile
        return found

    def _take_place(self) -> None:
        """Take the right to write behind the URI; an error if this process may not."""
        raise NotImplementedError

    def _prepare(self) -> Run | None:
        """Bring the work folder up to date; if it contains the finished run, send that run and return it."""
        raise NotImplementedError

    def _counts(self, name: str) -> bool:
        """Does a file of this name decide whether the folder is a run's?"""
        return not name.startswith(".")

    def _existing_run(self) -> Run | None:
        """The finished run elsewhere; None if this run may be scored there; RunError if it may not."""
        place, objects = self.place, self._objects
        names = {found.name for found in objects.listed() if self._counts(found.name)}
        if not names:
            itself = objects.look()
            if itself is not None and not itself.is_folder:
                raise RunError(f"{place} is a file", fix="give a folder to --out")
            return None
        begun = None
        if PARTIAL_FOLDER in names:
            begun = _identity_in(SentJournals(objects).first_line(most=LONGEST_HEADER))
        known = _identity_in(read_manifests(objects).get(MANIFEST, b"")) if MANIFEST in names else None
        others = {name for name in names if not FLAG.fullmatch(name) and name != PARTIAL_FOLDER}
        if begun is None and known is None and others:
            foreign = sorted(name for name in others if name not in (MANIFEST, SCORES) and not is_reference_file(name))
            name = foreign[0] if foreign else min(others)
            raise RunError(
                f"{place} is not a run: it contains {harmless(name)}", fix="give a new or empty folder to --out"
            )
        if self._fresh:
            return None
        if MANIFEST in names:
            try:
                runs.require_same(place, known or {}, self.identity)
                return replace(runs.load(place), cached=True)
            except RunError:
                if begun != self.identity:
                    raise
                return None  # a process with --fresh was killed before it removed the old run
        if begun is not None:
            runs.require_same(place, begun, self.identity)
        return None

    def check_reference(self) -> None:
        """Raise StorageError if a file is missing; the content of files is checked when they are fetched."""
        objects = Objects(self.place)
        present_files(objects, read_manifests(objects))

    def _manifests(self) -> dict[str, bytes]:
        return {n: (self.folder / n).read_bytes() for n in (REFERENCE, MANIFEST) if (self.folder / n).exists()}

    def _files(self) -> list[tuple[str, str]]:
        """Names and hashes of a finished run's files except its manifests, in the order in which they are sent."""
        return list(files_in(self._manifests(), self.place))

    def _become_copy(self) -> None:
        """Give the work folder the name of a copy, so that its files are not fetched when the run is read here."""
        copy = copy_folder(self._manifests())
        with suppress(OSError):  # the copy exists already: then the cache removes this folder when it is full
            for name in (PLACE, ROWS, PARTIAL):
                (self.folder / name).unlink(missing_ok=True)
            os.rename(self.folder, copy)
            (copy / LOCK).unlink(missing_ok=True)


class RemoteClaim(PlaceClaim):
    """A folder behind a URI for one run: gives its finished run, or else the right to write there, and a work folder.

    A folder that is not a run's is never changed.
    """

    shard_bytes = 1 << 28  # smaller than in a local folder: a lost machine loses the rows of unfinished shards
    _has_begun = False

    @property
    def writer(self) -> RemoteWriter:
        assert self.remote is not None, "the folder is not taken"
        return self.remote

    def _take_place(self) -> None:
        self.remote = RemoteWriter(self.place, self.folder)

    def _prepare(self) -> Run | None:
        writer, path = self.writer, self.folder / JOURNAL
        self._old_files = {found.name for found in self._objects.listed() if not found.is_folder}
        if writer.is_outdated:
            self._clear()
        writer.keep_sent(self._old_files)
        if self._fresh:
            return None
        if (self.folder / MANIFEST).exists():
            with suppress(RunError):
                found = runs.finished_in(self.folder, self.identity)
                if all((self.folder / name).exists() or writer.sent.get(name) == sha for name, sha in self._files()):
                    return self.publish(found)
            self._clear()
        if writer.is_ahead_of(path):
            self._clear()
            writer.fetch_journal(path)
            writer.keep_sent(self._old_files)
        return None

    def _clear(self) -> None:
        self.writer.keep_sent(())
        for path in list(self.folder.iterdir()):
            if path.name not in (LOCK, PLACE):
                path.unlink()

    def begin(self) -> None:
        """Take over the folder for this run: send the scores so far, then remove the files that it replaces."""
        if self._has_begun:
            return
        self._has_begun, writer, path, fresh = True, self.writer, self.folder / JOURNAL, self._fresh
        is_same = not fresh and journal.inspect_journal(path).identity == self.identity
        super().begin()
        if not is_same:
            writer.keep_sent(())
        writer.send_journal(path, resumes=is_same)
        own = sorted(name for name in self._old_files if is_reference_file(name) and name != REFERENCE)
        replaced = (MANIFEST, SCORES, REFERENCE, *(own if fresh else ()))  # the manifest first
        writer.remove(*(name for name in replaced if name in self._old_files))
        writer.remove_journals(of_others=True)

    def watched(self, progress: runs.Progress | None) -> runs.Progress | None:
        """A progress callback that also stops the run if another process took its folder over."""
        lease = self.writer.lease

        def report(done: int, total: int) -> None:
            lease.raise_if_lost()
            if progress is not None:
                progress(done, total)

        report.phase = getattr(progress, "phase", None)  # type: ignore[attr-defined]
        return report

    def publish(self, run: Run) -> Run:
        """Send the files of the finished run, its manifest last."""
        writer = self.writer
        writer.stop_sending()
        try:
            for name, sha256 in self._files():
                writer.deliver(name, sha256)
            for name in self._manifests():
                writer.deliver(name)
            self._is_complete = True
            writer.remove_journals()
            writer.remove(ROWS, PARTIAL)  # older versions sent them
        except StorageError as error:
            if not self._is_complete:
                raise StorageError(f"the run is complete, but {error.message}", fix=STAYS) from None
        return replace(run, path=str(self.place))

    def release(self) -> None:
        if self.remote is not None:
            self.remote.close()
            self.remote = None
            if self._is_complete:
                self._become_copy()
        super().release()


class HubClaim(PlaceClaim):
    """A folder of a repository for one run. Two processes may score the same; only one of them publishes."""

    shard_bytes = 1 << 25  # small files, because a reader fetches those that contain the rows it needs

    def __init__(self, place: Place, identity: dict[str, Any], *, fresh: bool = False, kind: str = "runs") -> None:
        super().__init__(place, identity, fresh=fresh, kind=kind)
        self._repository = Repository.of(place)
        self._follows: str | None = None  # the newest commit when the folder was looked at

    def _counts(self, name: str) -> bool:
        return name in (MANIFEST, SCORES) or is_reference_file(name)

    def _existing_run(self) -> Run | None:
        self._follows = self._repository.last_commit()
        if self._follows is None:  # there is no repository yet
            return None
        found = super()._existing_run()
        self._old_files = {one.name for one in self._objects.listed() if self._counts(one.name)}
        return found

    def _take_place(self) -> None:
        if self._follows is None:
            self._repository.create()
            print_line(
                f"scoremode: created {self.place} on the hub; it is private until you change that in its settings"
            )
        else:
            self._repository.require_writable()

    def _prepare(self) -> Run | None:
        if (self.folder / MANIFEST).exists() and not self._fresh:
            with suppress(RunError):
                found = runs.finished_in(self.folder, self.identity)
                if all((self.folder / name).exists() for name, _ in self._files()):
                    return self.publish(found)
            for path in list(self.folder.iterdir()):  # another run, which was never published
                if path.name != LOCK:
                    path.unlink()
        return None

    def publish(self, run: Run) -> Run:
        """Adds the files of the finished run in one commit, which also removes those of the run that it replaces."""
        names = [*(name for name, _ in self._files()), *self._manifests()]
        files = {name: self.folder / name for name in names}
        what = "reference" if REFERENCE in files else "run"
        try:
            for _ in range(ATTEMPTS):
                with suppress(ConflictError):
                    self._repository.commit(
                        files,
                        sorted(self._old_files - files.keys()),
                        follows=self._follows,
                        message=f"Add a {what} made by scoremode",
                    )
                    self._is_complete = True
                    return replace(run, path=str(self.place))
                found = self._existing_run()  # an error if another run was published meanwhile
                if found is not None:
                    return found
        except StorageError as error:
            raise StorageError(f"the run is complete, but {error.message}", fix=f"{error.fix}; {STAYS}") from None
        raise StorageError(f"{self.place} is changed by others all the time", fix=STAYS)

    def release(self) -> None:
        if self._is_complete:
            self._become_copy()
            self._is_complete = False
        super().release()


def claim_at(place: Place, identity: dict[str, Any], *, fresh: bool = False, kind: str = "runs") -> PlaceClaim:
    chosen = HubClaim if is_repository(place) else RemoteClaim
    return chosen(place, identity, fresh=fresh, kind=kind)


def _identity_in(data: bytes) -> dict[str, Any] | None:
    """The identity in a manifest or in the first line of a journal; None if it cannot be read."""
    try:
        found = parse(data)
    except ValueError:
        return None
    identity = found.get("identity") if isinstance(found, dict) else None
    return identity if runs.is_identity(identity) else None
