"""Runs in a folder elsewhere, behind a URI: scored in a work folder here, sent while they are scored.

URI/writer-….json     who is writing (leases.py)
URI/partial/WRITER/…  while scoring: the journal, in pieces (segments.py)
URI/scores.parquet    one row per target
URI/manifest.json     written last: if it is there, the run is complete

The work folder lies in the cache and is named after the URI; it is an ordinary run folder (runs.py) with a note that
says who wrote it. Another machine has none: it makes one from the pieces. Files are sent in this order: pieces,
columns, manifest; then the pieces are removed. With --fresh, a new journal is sent; then the old run's manifest is
removed, then its columns, then a reference's files. So after a kill the folder elsewhere always contains a complete
run, or pieces of the run that is being scored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from scoremode.disk.locks import Lock
from scoremode.errors import InputError, RunError, StorageError, harmless
from scoremode.places.objects import Objects, patience
from scoremode.places.uri import SERVERS, Place
from scoremode.references.writer import RemoteShards
from scoremode.scores import journal
from scoremode.store import runs
from scoremode.store.leases import FLAG, Lease
from scoremode.store.mirror import Mirror
from scoremode.store.remote_copies import check_files, copy_folder, read_manifests
from scoremode.store.remote_note import Note
from scoremode.store.remote_reference import SentShards, fetch_unfinished
from scoremode.store.run import Run
from scoremode.store.segments import (
    PARTIAL_FOLDER,
    Chain,
    Sender,
    cut_to_sound,
    fetch_chain,
    first_line_of,
    length_of,
    longest,
    read_chains,
    whole_until,
)
from scoremode.strict_json import parse

FIRST_CONTACT = 10.0  # seconds for which the first requests are tried again
SHORTLY = 2.0  # seconds for which the last ones are, of a process that is interrupted
NOTED = "what was scored is kept on this machine: run the same command again to send it"


def work_folder(place: Place, kind: str) -> Path:
    """The folder of this machine in which a run for that place is made."""
    return cache_folder() / kind / hashlib.sha256(f"work for {place}".encode()).hexdigest()[:20]


@contextmanager
def claimed_at(
    place: Place, identity: dict[str, Any], *, fresh: bool = False, kind: str = "runs"
) -> Iterator[runs.Claim]:
    """As ``runs.claimed``, for a folder elsewhere. A folder that is not a run's is never changed."""
    if place.scheme in SERVERS:
        raise InputError(f"{place} cannot be written: a server of files is only read", fix="give another --out")
    cache_limit()  # raises if the limit is invalid, before anything is scored
    objects = Objects(place, seconds=min(FIRST_CONTACT, patience()))
    found = _existing_run(objects, identity, fresh=fresh)  # raises before anything is written
    claim = (
        FinishedElsewhere(place, identity, found)
        if found is not None
        else _take(objects, identity, fresh=fresh, kind=kind)
    )
    try:
        yield claim
    finally:
        claim.release()


class FinishedElsewhere(runs.Claim):
    """The finished run of a folder elsewhere."""

    def __init__(self, place: Place, identity: dict[str, Any], finished: Run) -> None:
        super().__init__(work_folder(place, "runs"), identity, finished)
        self.place = place

    def check_reference(self) -> None:
        check_files(self.place)  # their content is checked when they are fetched


# ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────────
def _existing_run(objects: Objects, identity: dict[str, Any], *, fresh: bool) -> Run | None:
    """The finished run elsewhere; None if this run may be scored there; RunError if it may not."""
    place, names = objects.place, {found.name for found in objects.listed() if not found.name.startswith(".")}
    if not names:
        itself = objects.look()
        if itself is not None and not itself.is_folder:
            raise RunError(f"{place} is a file", fix="give a folder to --out")
        return None
    begun = _identity_of_chains(objects, read_chains(objects)) if PARTIAL_FOLDER in names else None
    manifest = _identity_of_manifest(objects) if MANIFEST in names else None
    _require_ours(place, names, known=begun is not None or manifest is not None)
    if fresh:
        return None
    if MANIFEST in names:
        try:
            runs.require_same(place, manifest or {}, identity)
            return replace(runs.load(place), cached=True)
        except RunError:
            if begun != identity:
                raise
            return None  # a process with --fresh was killed before it removed the old run
    if begun is not None:
        runs.require_same(place, begun, identity)
    return None


def _require_ours(place: Place, names: set[str], *, known: bool) -> None:
    """Refuse a folder with files that scoremode did not write."""
    ours = {MANIFEST, SCORES, PARTIAL_FOLDER}
    foreign = sorted(n for n in names if n not in ours and not is_reference_file(n) and not FLAG.fullmatch(n))
    begins = all(FLAG.fullmatch(name) or name == PARTIAL_FOLDER for name in names)
    if not known and not begins:
        name = foreign[0] if foreign else min(names - {PARTIAL_FOLDER})
        raise RunError(f"{place} is not a run: it contains {harmless(name)}", fix="give a new or empty folder to --out")


def _identity_of_chains(objects: Objects, chains: dict[str, Chain]) -> dict[str, Any] | None:
    """The identity of the run whose pieces are there; None if there is none that can be read."""
    holder = longest(chains)
    return None if holder is None else _identity_in(first_line_of(objects, chains[holder]))


def _identity_of_manifest(objects: Objects) -> dict[str, Any] | None:
    return _identity_in(read_manifests(objects).get(MANIFEST, b""))


def _identity_in(data: bytes) -> dict[str, Any] | None:
    try:
        found = parse(data)
    except ValueError:
        return None
    identity = found.get("identity") if isinstance(found, dict) else None
    return identity if runs.is_identity(identity) else None


# ── take it ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _take(objects: Objects, identity: dict[str, Any], *, fresh: bool, kind: str) -> runs.Claim:
    place = objects.place
    folder = work_folder(place, kind)
    lock, _ = runs.lock_folder(folder, waits=False, name=str(place))
    try:
        note = Note.read(folder, place)
        lease = Lease(objects, note.holder)
        lease.acquire()
        mirror = Mirror(lease, None, str(place), seldom=objects.writes_are_costly)
        mirror.start()
        claim = RemoteClaim(objects, folder, identity, lock, note=note, lease=lease, mirror=mirror, fresh=fresh)
    except BaseException:
        lock.release()
        raise
    try:
        found = _existing_run(objects, identity, fresh=fresh)  # again, because it may have changed before the lease
        if found is None:
            found = claim.prepare()
    except BaseException:
        claim.release()
        raise
    if found is None:
        return claim
    claim.release()
    return FinishedElsewhere(place, identity, found)


class RemoteClaim(runs.Claim):
    """A folder elsewhere for one run, and the work folder here."""

    shard_bytes = 1 << 28  # smaller than elsewhere: a lost machine loses the rows of shards that are not complete

    def __init__(
        self,
        objects: Objects,
        folder: Path,
        identity: dict[str, Any],
        lock: Lock,
        *,
        note: Note,
        lease: Lease,
        mirror: Mirror,
        fresh: bool,
    ) -> None:
        super().__init__(folder, identity, None, lock, fresh=fresh)
        self.place, self._objects, self._note = objects.place, objects, note
        self._lease, self._mirror = lease, mirror
        self._sender: Sender | None = None
        self._chain: Chain = []
        self._sent = 0
        self._replaces = fresh
        self._old_writers: set[str] = set()  # whose pieces are replaced by this writer's
        self._old_files: set[str] = set()  # that are replaced by this run's
        self._complete = False
        self._shards = SentShards(self.place, folder, lease.check, note)

    def shards_go_to(self) -> RemoteShards:
        return self._shards

    def prepare(self) -> Run | None:
        """Make the work folder what it must be; the run if it was scored here and only has to be sent."""
        chains = read_chains(self._objects)
        self._chain = chains.get(self._note.holder, [])
        self._old_writers = chains.keys() - {self._note.holder}
        self._old_files = {found.name for found in self._objects.listed() if not found.is_folder}
        if self._note.is_new or (chains and not self._chain):  # others wrote there since
            self._clear()
        self._note.keep_only(self._old_files)
        if self._replaces:
            return None
        if (self.folder / MANIFEST).exists():
            with suppress(RunError):
                found = runs.finished_in(self.folder, self.identity)
                if all(
                    self._note.sent.get(n) == h or (self.folder / n).exists() for n, h in files_of(self.folder, found)
                ):
                    return self.kept(found)
            self._clear()
        here, best = whole_until(self.folder / JOURNAL), longest(chains)
        if best is not None and length_of(chains[best]) > here:
            self._clear()
            fetch_chain(self._objects, chains[best], self.folder / JOURNAL)
            fetch_unfinished(Objects(self.place), self.folder, self._note)
            self._sent = length_of(self._chain) if best == self._note.holder else 0
        else:
            self._sent = min(length_of(self._chain), here)
        return None

    def _clear(self) -> None:
        """Remove a run from the work folder."""
        self._note.sent = {}
        for path in list(self.folder.iterdir()):
            if path.name not in (LOCK, PLACE):
                path.unlink()

    def begin(self) -> None:
        """Take over the folder for this run: send what is scored so far, then remove what it replaces."""
        if self._sender is not None:
            return
        path = self.folder / JOURNAL
        same = not self._fresh and journal.inspect_journal(path).identity == self.identity
        super().begin()
        if not same:
            self._note.forget()
        whole = cut_to_sound(path)
        sent = min(self._sent, whole) if same else 0
        self._sender = Sender(Objects(self.place, seconds=0.0), self._note.holder, path, self._chain, sent)
        self._send_all(self._sender)
        self._remove_old()
        self._mirror.send_from_now(self._sender)

    def _send_all(self, sender: Sender) -> None:
        with_patience = Sender(Objects(self.place), self._note.holder, self.folder / JOURNAL, self._chain, sender.sent)
        with_patience.send()
        sender.go_on_after(with_patience)

    def _remove_old(self) -> None:
        """Remove what this run replaces, of what was there when the folder was taken: the manifest first."""
        own = sorted(name for name in self._old_files if is_reference_file(name) and name != REFERENCE)
        for name in (MANIFEST, SCORES, REFERENCE, *(own if self._replaces else ())):
            if name in self._old_files:
                self._lease.check()
                self._objects.remove(name)
        for holder in sorted(self._old_writers):
            self._lease.check()
            self._objects.remove_folder(f"{PARTIAL_FOLDER}/{holder}")

    def watched(self, progress: runs.Progress | None) -> runs.Progress | None:
        return _Watched(progress, self._mirror)

    def kept(self, run: Run) -> Run:
        """Send the finished run: the manifest last."""
        self._mirror.check()
        self._mirror.send_from_now(None)
        self._shards.settle()
        patient = Objects(self.place)
        try:
            for name, sha256 in files_of(self.folder, run):
                if self._note.sent.get(name) != sha256:
                    self._lease.check()
                    patient.send(name, self.folder / name)
                    self._note.add(name, sha256)
            self._lease.check()
            patient.send(MANIFEST, self.folder / MANIFEST)
            self._complete = True
            self._lease.check()
            patient.remove_folder(PARTIAL_FOLDER)
            for name in (ROWS, PARTIAL):
                patient.remove(name)
        except StorageError as error:
            if not self._complete:
                raise StorageError(f"the run is complete, but {error.message}", fix=NOTED) from None
        return replace(run, path=str(self.place))

    def release(self) -> None:
        if self._lock is None:
            return
        self._shards.settle()
        self._mirror.stop()
        with suppress(StorageError, OSError, RunError):
            if self._sender is not None and not self._complete:
                self._lease.check()
                self._sender.send()
            self._lease.release()
        if self._complete:
            self._become_copy()
        super().release()

    def _become_copy(self) -> None:
        """Give the work folder the name of a copy, so that the run is not fetched when it is read here.

        Shards of a reference that were removed are fetched then: without its manifest, a copy is not complete.
        """
        manifests = {n: (self.folder / n).read_bytes() for n in (MANIFEST, REFERENCE) if (self.folder / n).exists()}
        copy = copy_folder(manifests)
        with suppress(OSError):  # it is there already, or not empty: then this one goes when the cache is full
            whole = all((self.folder / name).exists() for name, _ in files_of(self.folder))
            for name in (PLACE, ROWS, PARTIAL, *(() if whole else (MANIFEST,))):
                (self.folder / name).unlink(missing_ok=True)
            os.rename(self.folder, copy)
            (copy / LOCK).unlink(missing_ok=True)


class _Watched:
    """A progress that also stops a run whose folder was taken over."""

    def __init__(self, progress: runs.Progress | None, mirror: Mirror) -> None:
        self._progress, self._mirror = progress, mirror

    def __call__(self, done: int, total: int) -> None:
        self._mirror.check()
        if self._progress is not None:
            self._progress(done, total)

    def phase(self, words: str) -> None:
        tell = getattr(self._progress, "phase", None)
        if tell is not None:
            tell(words)


def files_of(folder: Path, run: Run | None = None) -> Iterator[tuple[str, str]]:
    """Names and hashes of a finished run's files but the manifest, in the order in which they are sent."""
    manifest = run.manifest if run is not None else parse((folder / MANIFEST).read_bytes())
    if (folder / REFERENCE).exists():
        data = (folder / REFERENCE).read_bytes()
        known = parse(data)
        for entry in (*known["shards"], known["head"]):
            yield str(entry["file"]), str(entry["sha256"])
        yield REFERENCE, hashlib.sha256(data).hexdigest()
    yield SCORES, str(manifest["scores_sha256"])
