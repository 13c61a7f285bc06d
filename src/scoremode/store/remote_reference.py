"""References behind a URI: each shard is sent as soon as it is complete, by a thread of its own.

URI/states-….safetensors      a complete shard
URI/partial.rows              which rows are written, with their checksums; sent after each shard
URI/partial.reference.json    the layout of the shards

Another machine fetches these before it goes on. Rows are counted as written only if their checksums are right, so
what was sent incompletely is scored again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scoremode.errors import RunError, StorageError
from scoremode.places.objects import Objects
from scoremode.store.files import file_sha256
from scoremode.store.leases import LeaseLostError
from scoremode.store.reference_format import PARTIAL, ROWS, ShardLayout, read_partial, shard_name
from scoremode.store.reference_writer import make_shard

PAUSE = 5.0  # seconds between two attempts
LARGEST_NOTES = 1 << 30


class ShardSender:
    """A thread that sends the shards whose names it is told, from the first one until ``stop``."""

    def __init__(
        self, objects: Objects, folder: Path, check: Callable[[], None], sent: Callable[[str, str], None]
    ) -> None:
        """``check`` raises if this process may no longer write; ``sent`` is told each name and sha256."""
        self._objects, self._folder, self._check, self._sent = objects, folder, check, sent
        self._waiting: queue.Queue[str] = queue.Queue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, name: str) -> None:
        """Send this shard when there is time."""
        self._waiting.put(name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="scoremode-shards", daemon=True)
            self._thread.start()

    def stop(self) -> None:
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
        sha256 = file_sha256(self._folder / name)
        self._objects.send(name, self._folder / name)
        for notes in (ROWS, PARTIAL):
            self._objects.send(notes, self._folder / notes)
        self._sent(name, sha256)


def fetch_unfinished(objects: Objects, folder: Path) -> None:
    """Make an unfinished reference from what was sent; nothing if there is none that can be used."""
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
    for shard in range(layout.shards):
        name, size = shard_name(shard), layout.shard_size(shard)
        with suppress(StorageError):  # replaced or cut meanwhile: its rows are scored again
            if present.get(name) == size:
                objects.fetch(name, folder / name, size=size)
                continue
        make_shard(folder / name, layout.shard_header(shard), size)
