"""Results of pairs in a file behind a URI: written in a work folder here, sent while they are scored.

URI                          the results, when all are there
URI.manifest.json            which question they answer; has their sha256
URI.scoremode/writer-….json  who is writing (leases.py)
URI.scoremode/partial/…      while scoring: what is done so far, in pieces (segments.py)

As in a folder of this machine, the manifest takes its name before the results do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from scoremode.disk.folders import cache_folder
from scoremode.errors import RunError, StorageError
from scoremode.places.copies import FILES
from scoremode.places.objects import Objects, patience
from scoremode.places.uri import Place
from scoremode.store.leases import Lease
from scoremode.store.mirror import Mirror
from scoremode.store.outputs import Output
from scoremode.store.remote_note import Note
from scoremode.store.remote_runs import FIRST_CONTACT, NOTED
from scoremode.store.runs import lock_folder
from scoremode.store.segments import PARTIAL_FOLDER, Sender, cut_to_sound, fetch_chain, length_of, longest, read_chains

MANIFEST, PARTIAL, WORK = ".manifest.json", ".partial", ".scoremode"


@contextmanager
def worked_on_here(output: Output, *, fresh: bool = False) -> Iterator[Output]:
    """A file of this machine to write instead of one behind a URI, which is sent at the end; others are as they are."""
    place = output.place
    if place is None:
        yield output
        return
    work = Place(place.scheme, place.path + WORK, place.settings)
    folder = cache_folder() / FILES / hashlib.sha256(str(place).encode()).hexdigest()[:20]
    lock, _ = lock_folder(folder, waits=False, name=str(place))
    try:
        note = Note.read(folder, place)
        lease = Lease(Objects(work, seconds=min(FIRST_CONTACT, patience())), note.holder)
        lease.acquire()
        mirror = Mirror(lease, None, str(place))
        mirror.start()
        try:
            local = replace(output, path=folder / place.name, place=None)
            mirror.send_from_now(_prepare(place, work, note, local.path, fresh=fresh))
            yield local
            mirror.check()
            mirror.send_from_now(None)
            _send(place, work, lease, local.path)
        except RunError as error:
            message, fix = (t.replace(str(folder / place.name), str(place)) for t in (error.message, error.fix))
            raise type(error)(message, fix=fix) from None
        finally:
            mirror.stop()
            with suppress(StorageError):
                lease.release()
    finally:
        lock.release()


def _prepare(place: Place, work: Place, note: Note, path: Path, *, fresh: bool) -> Sender:
    """Make the work folder what it must be: finished results, or what was scored so far."""
    objects, pieces = Objects(place.parent), Objects(work)
    chains = read_chains(pieces)
    mine = chains.get(note.holder, [])
    partial, manifest = path.with_name(path.name + PARTIAL), path.with_name(path.name + MANIFEST)
    present = {found.name: found.size for found in objects.listed() if not found.is_folder}
    if note.is_new or (chains and not mine) or path.name in present:
        for left in (path, manifest, partial):
            left.unlink(missing_ok=True)
    note.write()
    for one in (manifest, path):
        if one.name in present and path.name in present:
            objects.fetch(one.name, one, size=present[one.name])
    sender = Objects(work, seconds=0.0)
    if fresh:
        partial.unlink(missing_ok=True)
    here, best = cut_to_sound(partial), longest(chains)
    if best is not None and length_of(chains[best]) > here and path.name not in present and not fresh:
        fetch_chain(pieces, chains[best], partial)
        here = cut_to_sound(partial)
        return Sender(sender, note.holder, partial, mine, here if best == note.holder else 0)
    return Sender(sender, note.holder, partial, mine, min(length_of(mine), here))


def _send(place: Place, work: Place, lease: Lease, path: Path) -> None:
    objects = Objects(place.parent)
    try:
        for name in (path.name + MANIFEST, path.name):
            lease.check()
            objects.send(name, path.with_name(name))
        lease.check()
        Objects(work).remove_folder(PARTIAL_FOLDER)
    except StorageError as error:
        raise StorageError(f"the results are complete, but {error.message}", fix=NOTED) from None
