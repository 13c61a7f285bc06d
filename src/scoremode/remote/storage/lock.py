"""One lock object keeps two writers of a place behind a URI apart: the store creates it only if there is none.

FOLDER/lock.json   the id of the writer's work folder, its host, its process, and since when it writes

A process that was killed leaves its lock. The same command on the same machine finds the id of its work folder in it,
and goes on. Nobody else does: a user who knows that the writer died deletes the object.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import PLACE
from scoremode.core.disk.uri import RemotePath
from scoremode.errors import RunError, StorageError, harmless, print_line
from scoremode.remote.storage.file_systems import creating
from scoremode.remote.storage.objects import Objects

LOCK_OBJECT = "lock.json"
LARGEST_LOCK = 1 << 16
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # of fsspec, with the conditional writes that Arrow lacks


class Holder(msgspec.Struct, frozen=True):
    """The content of a lock. Anybody may have written it: if it cannot be read, the defaults count."""

    id: str = ""
    host: str = "an unknown machine"
    process: int = 0
    since: str = "an unknown time"


class Note(msgspec.Struct, frozen=True):
    place: str
    holder: str  # the id of the work folder


class RemoteLock:
    """The right to write ``of``, a place behind a URI, from ``acquire`` to ``release``. The work folder must be locked.

    ``objects`` and ``name`` say where the lock object is.
    """

    def __init__(self, of: RemotePath, objects: Objects, name: str, folder: Path) -> None:
        self._of, self._name = of, name
        self.stays = False  # with an upload that was cut
        self._objects, self._note, self._is_held = objects, folder / PLACE, False

    def _id(self) -> str | None:
        """The id of the work folder; None if it has none yet."""
        try:
            return msgspec.json.decode(self._note.read_bytes(), type=Note).holder
        except (OSError, msgspec.MsgspecError):
            return None

    def _holder(self) -> Holder | None:
        """Who holds the lock; None if nobody does."""
        data = self._objects.read(self._name, most=LARGEST_LOCK)
        try:
            return None if data is None else msgspec.json.decode(data, type=Holder)
        except (msgspec.MsgspecError, RecursionError):
            return Holder()

    def is_ours(self) -> bool:
        """Was the lock left by a process that had the same work folder?"""
        mine = self._id()
        holder = self._holder() if mine is not None else None
        return holder is not None and holder.id == mine

    def acquire(self) -> None:
        """Take the lock; RunError if another one holds it."""
        place, mine = self._of, self._id()
        if mine is None:
            mine = secrets.token_hex(8)
            write_atomically(self._note, msgspec.json.encode(Note(str(place), mine)))
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        data = msgspec.json.encode(Holder(mine, socket.gethostname(), os.getpid(), now))
        if not self._objects.create(self._name, data):
            holder = self._holder() or Holder()
            if holder.id != mine:
                raise RunError(
                    f"process {holder.process} on {harmless(holder.host)[:80]} has been writing into {place} since "
                    f"{harmless(holder.since)[:40]}",
                    fix=f"wait for it; if it died, delete {self._objects.place / self._name}",
                )
            self._objects.write(self._name, data)
        self._is_held = True
        if creating(self._objects.place) is None:
            hint = f"; pip install {PACKAGES[place.scheme]} helps" if place.scheme in PACKAGES else ""
            print_line(f"scoremode: nobody keeps two writers of {place} apart that begin at once{hint}")

    def release(self) -> None:
        """Remove the lock; does nothing if it is not held, or if it ``stays``."""
        if self._is_held and not self.stays:
            with suppress(StorageError):  # the same command recognizes it
                self._objects.remove(self._name)
        self._is_held = False
