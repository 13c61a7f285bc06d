"""The one writer of a folder elsewhere: it works in a folder of this machine, and sends files while they are written.

FOLDER/partial/WRITER/000007-1024-4096   bytes 1024 to 4096 of that writer's journal, the seventh piece it sent
FOLDER/partial/WRITER/sent.json          sha256 of each complete shard that it sent, for whoever resumes elsewhere
WORK/.place.json                         in the work folder: its URI, the writer's id, hashes of files that were sent

A journal grows by whole records with checksums, so a piece may end anywhere. A piece begins where the one before it
ended, or before that: then the writer had cut its journal there after a kill. Every writer's pieces hold a journal from
its first byte, and pieces of two writers are never joined.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from scoremode.disk.files import file_sha256, write_atomically
from scoremode.disk.folders import PLACE
from scoremode.disk.manifests import Sha256
from scoremode.disk.records import RecordFile, read_record_header
from scoremode.errors import RunError, StorageError, print_line
from scoremode.remote.copies import fetch_verified
from scoremode.remote.lease import Lease, LeaseLostError
from scoremode.remote.objects import Objects, patience
from scoremode.remote.uri import Place

PARTIAL_FOLDER, SENT = "partial", "sent.json"
PIECE = re.compile(r"([0-9a-f]{16})/(\d{6,})-(\d{1,18})-(\d{1,18})")
LARGEST = 16 << 20  # bytes of a piece
TICK = 0.25  # seconds between two looks for something to send
OFTEN, SELDOM = 5.0, 60.0  # seconds between two pieces: at the beginning, and later
SHARE = 0.01  # of the time so far that a lost machine may cost
MUCH = 8 << 20  # bytes that are sent before their time
LONGEST_PAUSE = 30.0  # seconds between two attempts
FIRST_CONTACT = 10.0  # seconds for which requests for the lease are tried again


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Piece(NamedTuple):
    """One piece of a writer's journal."""

    holder: str
    number: int
    begin: int
    end: int
    name: str


class SentJournals:
    """The journals in a folder elsewhere: the pieces of every writer, in order.

    The pieces of a writer end where one is missing or incomplete.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.pieces: dict[str, list[Piece]] = {}  # by the writer's id
        found = []
        for one in objects.listed(PARTIAL_FOLDER, deep=True):
            match = PIECE.fullmatch(one.name)
            if match is not None and not one.is_folder:
                piece = Piece(match[1], int(match[2]), int(match[3]), int(match[4]), f"{PARTIAL_FOLDER}/{one.name}")
                if 0 < piece.end - piece.begin == one.size <= LARGEST:
                    found.append(piece)
        for holder, pieces in groupby(sorted(found), key=lambda piece: piece.holder):
            self.pieces[holder] = []
            for piece in pieces:
                if piece.begin > self.length(holder):
                    break
                self.pieces[holder].append(piece)
        self.longest = max(self.pieces, key=lambda holder: (self.length(holder), holder), default="")

    def length(self, holder: str) -> int:
        """The length of a writer's journal in bytes."""
        pieces = self.pieces.get(holder)
        return pieces[-1].end if pieces else 0

    def first_line(self, *, most: int) -> bytes:
        """The first line of the longest journal; empty if it cannot be read."""
        begins = [piece for piece in self.pieces.get(self.longest, ()) if piece.begin == 0]
        data = self._objects.read(begins[-1].name, most=most) if begins else None
        return (data or b"").partition(b"\n")[0]

    def fetch_longest(self, to: Path) -> None:
        """Fetch the longest journal. Its records have checksums, which are checked when the records are read."""
        with to.open("wb") as file:
            for piece in self.pieces[self.longest]:
                data = self._objects.read(piece.name, most=LARGEST + 1)
                if data is None or len(data) != piece.end - piece.begin:
                    place = self._objects.place / piece.name
                    raise RunError(f"{place} was changed while it was read", fix="run the same command again")
                file.seek(piece.begin)
                file.truncate()
                file.write(data)


class Note(msgspec.Struct):
    """The content of .place.json in a work folder."""

    place: str
    holder: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # the writer's id
    sent: dict[str, str]  # sha256 by name of files that lie elsewhere


# ── the writer ───────────────────────────────────────────────────────────────────────────────────────────────────────
class RemoteWriter:
    """Holds the lease of a folder elsewhere, and sends from a thread what is written in the work folder.

    The journal is sent in pieces. Other files (shards of a reference) are sent whole as soon as they are complete,
    read back, and removed here. Scoring goes on while the storage cannot be reached; one line says so.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        """Take the folder elsewhere; RunError if another live process writes there. The work folder must be locked."""
        self.place, self.folder = place, folder
        self.objects, self._impatient = Objects(place), Objects(place, seconds=0.0)
        is_known = True
        try:
            self._note = msgspec.json.decode((folder / PLACE).read_bytes(), type=Note)
        except (OSError, msgspec.MsgspecError):
            self._note, is_known = Note(str(place), secrets.token_hex(8), {}), False
        self.holder = self._note.holder
        self._journal: Path | None = None
        self._shards: dict[str, None] = {}  # those that wait to be sent, in order
        self._sending = ""  # the shard that is on its way
        self._changed = threading.Condition()  # of notes and shards
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scoremode-writer", daemon=True)
        self.lease = Lease(Objects(place, seconds=min(FIRST_CONTACT, patience())), self.holder)
        self.lease.acquire()
        try:
            self.journals = SentJournals(self.objects)
        except BaseException:
            self.close()
            raise
        own = self.journals.pieces.get(self.holder)
        self._number, self._sent_bytes = (own[-1].number + 1, own[-1].end) if own else (0, 0)
        # is the work folder older than what lies elsewhere, because others wrote since?
        self.is_outdated = not is_known or (bool(self.journals.pieces) and not own)

    # ── files that were sent ─────────────────────────────────────────────────────────────────────────────────────────
    @property
    def sent(self) -> dict[str, str]:
        """The sha256 of each file that was sent, by name."""
        return self._note.sent

    def keep_sent(self, names: Iterable[str]) -> None:
        """Forget that files were sent, except for these files."""
        with self._changed:
            self._set_sent({name: self.sent[name] for name in names if name in self.sent})

    def record_sent(self, name: str, sha256: str) -> None:
        with self._changed:
            self._set_sent({**self.sent, name: sha256})

    def _set_sent(self, sent: dict[str, str]) -> None:
        self._note.sent = sent
        write_atomically(self.folder / PLACE, msgspec.json.encode(self._note))

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────────────────
    def is_ahead_of(self, path: Path) -> bool:
        """Is the longest journal that was sent longer than the sound part of this one?"""
        return self.journals.length(self.journals.longest) > cut_to_sound(path)

    def fetch_journal(self, to: Path) -> None:
        """Fetch the longest journal that was sent; the shards that its writer sent count as sent by this writer."""
        longest = self.journals.longest
        self.journals.fetch_longest(to)
        if longest != self.holder:
            self._sent_bytes = 0
        with suppress(msgspec.MsgspecError):
            data = self.objects.read(f"{PARTIAL_FOLDER}/{longest}/{SENT}", most=LARGEST)
            self._set_sent(msgspec.json.decode(data or b"{}", type=dict[str, Sha256]))

    def send_journal(self, path: Path, *, resumes: bool = True) -> None:
        """Send this journal, and from now on everything that is added to it.

        If it ``resumes``, bytes that were sent from this work folder are not sent again, up to the first bad record.
        """
        self._journal, self._sent_bytes = path, min(self._sent_bytes, cut_to_sound(path) if resumes else 0)
        if self.sent or (self._number and not resumes):  # else there is no list yet
            self._send_list(self.objects)
        self._send_pieces(self.objects)
        self._thread.start()

    def _waiting_bytes(self) -> int:
        with suppress(FileNotFoundError):
            return self._journal.stat().st_size - self._sent_bytes if self._journal is not None else 0
        return 0

    def _send_pieces(self, objects: Objects) -> None:
        end = self._sent_bytes + self._waiting_bytes()
        while self._journal is not None and self._sent_bytes < end:
            until = min(end, self._sent_bytes + LARGEST)
            name = f"{PARTIAL_FOLDER}/{self.holder}/{self._number:06d}-{self._sent_bytes}-{until}"
            objects.send(name, self._journal, self._sent_bytes, until)
            self._sent_bytes, self._number = until, self._number + 1

    # ── shards ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def send_shard(self, name: str) -> None:
        """Put a shard whose rows are all written and recorded into the queue; it is sent later, then removed here."""
        with self._changed:
            self._shards[name] = None

    def bring_back(self, name: str) -> None:
        """Bring a sent shard back, because it is about to be written; it no longer counts as sent."""
        path = self.folder / name
        with self._changed:
            self._changed.wait_for(lambda: self._sending != name)
            self._shards.pop(name, None)
            sha256 = self.sent.get(name)
            if sha256 is None:
                return
            if not path.exists():
                found = self.objects.look(name)
                size = found.size if found is not None else 0
                fetch_verified(self.objects, name, path, size=size, sha256=sha256, wrong="is not what was sent")
            self.keep_sent(self.sent.keys() - {name})

    def read_shard(self, name: str, offset: int, place: memoryview) -> None:
        """Fill ``place`` with the bytes at an offset of a shard that was sent and removed here."""
        place[:] = b"".join(self.objects.pieces(name, offset, offset + len(place)))

    def stop_sending_shards(self) -> None:
        """Send no more shards after the one on its way. Those that are here are sent with the finished reference."""
        with self._changed:
            self._shards.clear()
            self._changed.wait_for(lambda: not self._sending)

    def _send_next_shard(self) -> None:
        with self._changed:
            self._sending = name = next(iter(self._shards), "")
        path = self.folder / name
        try:
            if name and path.exists():
                self.lease.verify()
                sha256, size = file_sha256(path), path.stat().st_size
                self._send_list(self._impatient)  # without this shard: an older one of its name may be listed
                self._impatient.send(name, path)
                if self._impatient.sha256(name, size) != sha256:
                    raise StorageError(f"{self.place / name} is not what was sent", fix="try again")
                self.record_sent(name, sha256)
                self._send_list(self._impatient)
                path.unlink()
            with self._changed:
                self._shards.pop(name, None)
        finally:
            with self._changed:
                self._sending = ""
                self._changed.notify_all()

    def _send_list(self, objects: Objects) -> None:
        objects.write(f"{PARTIAL_FOLDER}/{self.holder}/{SENT}", msgspec.json.encode(self.sent))

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        began = sent = time.monotonic()
        pause, is_failing = TICK, False
        while not self._ended.wait(pause):
            now, waiting = time.monotonic(), self._waiting_bytes()
            interval = max(OFTEN, min(SELDOM, SHARE * (now - began)))
            is_due = waiting > 0 and (now - sent >= interval or waiting >= MUCH)
            if not is_due and not self._shards and not is_failing:
                continue
            try:
                self.lease.verify()
                while self._shards and not self._ended.is_set():
                    self._send_next_shard()
                self._send_pieces(self._impatient)
            except LeaseLostError:
                return  # the lease's own thread finds out as well, and its error ends the run
            except FileNotFoundError:
                continue  # the journal was completed meanwhile
            except (StorageError, OSError) as error:
                if not is_failing:
                    words = error.message if isinstance(error, StorageError) else str(error)
                    print_line(
                        f"scoremode: {words}; scoring goes on, and what is scored stays here until it can be sent"
                    )
                pause, is_failing = min(2 * pause, LONGEST_PAUSE), True
            else:
                if is_failing:
                    print_line(f"scoremode: {self.place} can be written again")
                pause, is_failing, sent = TICK, False, now

    def stop_sending(self) -> None:
        """End the sending thread when its current upload is done; LeaseLostError if another writer has the folder."""
        self._end_thread()
        self._journal = None
        self.lease.raise_if_lost()

    def _end_thread(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def deliver(self, name: str, sha256: str | None = None) -> None:
        """Send a file of the finished run, unless it was sent with this hash."""
        if sha256 is None or self.sent.get(name) != sha256:
            self.lease.verify()
            self.objects.send(name, self.folder / name)
            if sha256 is not None:
                self.record_sent(name, sha256)

    def remove(self, *names: str) -> None:
        """Remove these files elsewhere, in the given order."""
        for name in names:
            self.lease.verify()
            self.objects.remove(name)

    def remove_journals(self, *, of_others: bool = False) -> None:
        """Remove the pieces of all journals; with ``of_others``, only of other writers' journals found at the start."""
        others = [f"{PARTIAL_FOLDER}/{holder}" for holder in sorted(self.journals.pieces) if holder != self.holder]
        for folder in others if of_others else [PARTIAL_FOLDER]:
            self.lease.verify()
            self.objects.remove_folder(folder)

    def close(self) -> None:
        """Send the rest of the journal, if there is time and the folder is still ours, and give up the lease."""
        self._end_thread()
        with suppress(StorageError, OSError, RunError):
            if self._waiting_bytes():
                self.lease.verify()
                self._send_pieces(self._impatient)
        with suppress(StorageError, OSError, RunError):
            self.lease.release()


def cut_to_sound(path: Path) -> int:
    """Check every record of a file and cut it after the last good one; return its new length, 0 without a file."""
    with suppress(FileNotFoundError, RunError):
        header = read_record_header(path)
        if header is not None:
            file = RecordFile(path, header)
            try:
                for _ in file.replay():
                    pass
            finally:
                file.close()
            return file.end
    return 0
