"""A file that grows here, as immutable pieces elsewhere: what was scored, where objects cannot be appended to.

FOLDER/partial/WRITER/000007-1024-4096   bytes 1024 to 4096 of a writer's journal, the seventh piece it sent

A piece begins where the one before it ended, or before that: then the writer had cut its file there. Every writer's
pieces hold a whole journal from its first byte, so pieces of two writers are never joined.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from scoremode.disk.files import written_atomically
from scoremode.disk.records import HEAD, LONGEST_HEADER, MAGIC
from scoremode.errors import RunError
from scoremode.places.objects import Objects

PARTIAL_FOLDER = "partial"
PIECE = re.compile(r"([0-9a-f]{16})/(\d{6,})-(\d{1,18})-(\d{1,18})")
LARGEST = 16 << 20  # bytes of a piece


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a writer's file."""

    name: str
    number: int
    begin: int
    end: int


Chain = list[Segment]


def read_chains(objects: Objects) -> dict[str, Chain]:
    """The pieces that every writer sent, in order; each list ends where a piece is missing or incomplete."""
    found: dict[str, Chain] = {}
    for one in objects.listed(PARTIAL_FOLDER, deep=True):
        match = PIECE.fullmatch(one.name)
        if match is None or one.is_folder:
            continue
        begin, end = int(match[3]), int(match[4])
        if begin < end <= begin + LARGEST and one.size == end - begin:
            name = f"{PARTIAL_FOLDER}/{one.name}"
            found.setdefault(match[1], []).append(Segment(name, int(match[2]), begin, end))
    return {holder: _connected(sorted(chain, key=lambda s: s.number)) for holder, chain in found.items()}


def _connected(chain: Chain) -> Chain:
    kept: Chain = []
    for segment in chain:
        if segment.begin > length_of(kept):
            break
        kept.append(segment)
    return kept


def length_of(chain: Chain) -> int:
    """Bytes of the file that a chain makes."""
    return chain[-1].end if chain else 0


def longest(chains: dict[str, Chain]) -> str | None:
    """The writer whose chain is the longest; None if there is none."""
    known = [holder for holder, chain in chains.items() if chain]
    return max(known, key=lambda holder: (length_of(chains[holder]), holder), default=None)


def first_line_of(objects: Objects, chain: Chain) -> bytes:
    """The first line of the file that a chain makes."""
    begins = [segment for segment in chain if segment.begin == 0]
    data = objects.read(begins[-1].name, most=LONGEST_HEADER) if begins else None
    line, end, _ = (data or b"").partition(b"\n")
    return line + end


def fetch_chain(objects: Objects, chain: Chain, to: Path) -> None:
    """Make the file of a chain. Its records have checksums, which are checked when they are read."""
    with written_atomically(to) as file:
        for segment in chain:
            data = objects.read(segment.name, most=LARGEST + 1)
            if data is None or len(data) != segment.end - segment.begin:
                raise RunError(
                    f"{objects.place / segment.name} was changed while it was read", fix="run the same command again"
                )
            file.seek(segment.begin)
            file.truncate()
            file.write(data)


class Sender:
    """Sends what a file has that was not sent yet, up to its last whole record."""

    def __init__(self, objects: Objects, holder: str, path: Path, chain: Chain, sent: int) -> None:
        """``chain`` is what this writer sent before, of which the file still has the first ``sent`` bytes."""
        self._objects, self._holder, self._path = objects, holder, path
        self._next = chain[-1].number + 1 if chain else 0
        self.sent = self._whole = sent

    def waiting(self) -> int:
        """Bytes that were not sent yet; a record that is being written counts, too."""
        try:
            return os.stat(self._path).st_size - self.sent
        except FileNotFoundError:
            return 0

    def go_on_after(self, other: Sender) -> None:
        """Continue where another sender of the same file ended."""
        self.sent, self._whole, self._next = other.sent, other._whole, other._next

    def send(self) -> None:
        """Send it all, in pieces of limited size."""
        self._whole = whole_until(self._path, self._whole)
        while self.sent < self._whole:
            until = min(self._whole, self.sent + LARGEST)
            name = f"{PARTIAL_FOLDER}/{self._holder}/{self._next:06d}-{self.sent}-{until}"
            self._objects.send(name, self._path, self.sent, until)
            self.sent, self._next = until, self._next + 1


def whole_until(path: Path, begin: int = 0) -> int:
    """Where the last record ends that the file has in full length, of those that follow the byte ``begin``.

    ``begin`` is 0 or the end of a record. Checksums are not checked.
    """
    try:
        with path.open("rb") as file:
            size, at = os.fstat(file.fileno()).st_size, begin
            if begin == 0:
                line = file.readline(LONGEST_HEADER)
                if not line.endswith(b"\n"):
                    return 0
                at = len(line)
            while True:
                head = os.pread(file.fileno(), HEAD.size, at)
                if len(head) < HEAD.size:
                    return at
                magic, _, length, _ = HEAD.unpack(head)
                if magic != MAGIC or at + HEAD.size + length > size:
                    return at
                at += HEAD.size + length
    except FileNotFoundError:
        return begin


def cut_to_sound(path: Path) -> int:
    """Check every record and cut the file after the last good one; its length then, 0 if there is no file."""
    try:
        with path.open("r+b") as file:
            line = file.readline(LONGEST_HEADER)
            at, seed = (len(line) if line.endswith(b"\n") else 0), zlib.crc32(line)
            while at:
                file.seek(at)
                head = file.read(HEAD.size)
                if len(head) < HEAD.size:
                    break
                magic, number, length, checksum = HEAD.unpack(head)
                if magic != MAGIC or length > os.fstat(file.fileno()).st_size:
                    break
                body = file.read(length)
                known = zlib.crc32(body, zlib.crc32(struct.pack("<QI", number, length), seed))
                if len(body) < length or known != checksum:
                    break
                at += HEAD.size + length
            file.truncate(at)
            return at
    except FileNotFoundError:
        return 0
