"""References behind a URI: each shard is sent as soon as it is complete, by a thread of its own.

URI/states-….safetensors      a complete shard, read back before it is removed here
URI/partial.rows              which rows are written, with their checksums; sent after each shard
URI/partial.reference.json    the layout of the shards

Another machine fetches these before it goes on. Rows are counted as written only if their checksums are right, so
what was sent incompletely is scored again.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scoremode.disk.files import file_sha256
from scoremode.disk.folders import PARTIAL, ROWS, TEMPORARY, shard_name
from scoremode.errors import RunError, StorageError
from scoremode.places.objects import Objects
from scoremode.places.uri import Place
from scoremode.references.format import ShardLayout, read_partial
from scoremode.references.reader import is_shard_complete, row_records
from scoremode.store.leases import LeaseLostError
from scoremode.store.remote_note import Note

PAUSE = 5.0  # seconds between two attempts
LARGEST_NOTES = 1 << 30
FETCHED = TEMPORARY.replace("*", "shard")


class SentShards:
    """A thread that sends complete shards, reads them back, and removes them here; from the first until ``settle``."""

    def __init__(self, place: Place, folder: Path, check: Callable[[], None], note: Note) -> None:
        """``check`` raises if this process may no longer write; ``note`` knows what was sent."""
        self._objects, self._patient = Objects(place, seconds=0.0), Objects(place)
        self._folder, self._check, self._note = folder, check, note
        self._waiting: queue.Queue[str] = queue.Queue()
        self._ended = threading.Event()
        self._changing = threading.Lock()
        self._times: dict[str, int] = {}  # how often each shard was opened to be written
        self._thread: threading.Thread | None = None

    def complete(self, name: str) -> None:
        """Send this shard when there is time."""
        self._waiting.put(name)
        if self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self._run, name="scoremode-shards", daemon=True)
            self._thread.start()

    def needed(self, name: str) -> None:
        """This shard is about to be written: what was sent of it does not count, and it must be here."""
        with self._changing:
            self._times[name] = self._times.get(name, 0) + 1
            path, sha256 = self._folder / name, self._note.sent.get(name)
            if sha256 is not None and not path.exists():
                self._fetch_back(name, path, sha256)
            self._note.remove(name)

    def _fetch_back(self, name: str, path: Path, sha256: str) -> None:
        part, found = path.with_name(FETCHED), self._patient.look(name)
        part.unlink(missing_ok=True)
        if found is not None:
            self._patient.fetch(name, part, size=found.size)
        if found is None or file_sha256(part) != sha256:
            part.unlink(missing_ok=True)
            raise StorageError(f"{self._patient.place / name} is not what was sent", fix="start again with --fresh")
        os.replace(part, path)

    def sha256(self, name: str) -> str | None:
        return self._note.sent.get(name)

    def read(self, name: str, offset: int, place: memoryview) -> None:
        """Bytes of a shard that was removed here."""
        data = self._patient.read_at(name, offset, len(place))
        place[:] = data

    def settle(self) -> None:
        """End after the shard that is being sent. What was not sent is sent with the finished reference."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                name = self._waiting.get(timeout=0.25)
            except queue.Empty:
                continue
            while not self._ended.is_set():
                try:
                    self._send(name)
                    break
                except LeaseLostError:
                    return  # the mirror finds out as well, and says so
                except (StorageError, OSError):
                    self._ended.wait(PAUSE)  # the mirror says what is wrong

    def _send(self, name: str) -> None:
        self._check()
        with self._changing:
            times = self._times.get(name, 0)
        if not (self._folder / name).exists():
            return  # it was told twice
        sha256 = file_sha256(self._folder / name)
        self._objects.send(name, self._folder / name)
        for notes in (ROWS, PARTIAL):
            self._objects.send(notes, self._folder / notes)
        if self._objects.sha256(name) != sha256:
            raise StorageError(f"{self._objects.place / name} is not what was sent", fix="try again")
        with self._changing:
            if times == self._times.get(name, 0):  # else it is being written again, and told again
                self._note.add(name, sha256)
                (self._folder / name).unlink()


def fetch_unfinished(objects: Objects, folder: Path, note: Note) -> None:
    """Make an unfinished reference from what was sent; nothing if there is none that can be used.

    Each shard is fetched, checked, and removed again if all its rows are there: ``note`` says so.
    """
    present = {found.name: found.size for found in objects.listed() if not found.is_folder}
    if not {PARTIAL, ROWS} <= present.keys():
        return
    for name in (PARTIAL, ROWS):
        data = objects.read(name, most=LARGEST_NOTES)
        (folder / name).write_bytes(data or b"")
    try:
        known = read_partial(folder)
        layout = ShardLayout(**known["layout"]) if known is not None and known["ready"] else None
    except (RunError, TypeError):
        layout = None
    if layout is None:
        for name in (PARTIAL, ROWS):
            (folder / name).unlink(missing_ok=True)
        return
    records, _ = row_records((folder / ROWS).read_bytes(), layout)
    for shard in range(layout.shards):
        name, file = shard_name(shard), layout.shard_file(shard)
        if present.get(name) != file.size:
            continue
        with suppress(StorageError):  # replaced or cut meanwhile: its rows are scored again
            objects.fetch(name, folder / name, size=file.size)
            if is_shard_complete(folder, layout, shard, records):
                note.add(name, file_sha256(folder / name))
                (folder / name).unlink()
                continue
        if file.problem(folder / name) is not None:
            (folder / name).unlink(missing_ok=True)
