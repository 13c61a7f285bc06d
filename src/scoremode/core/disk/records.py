"""A file of numbered records with checksums, so that a killed process loses only unfinished work.

file    = one line of JSON that describes the computation
          records
record  = magic, number, bytes of the body, crc32 | body

The checksum covers the header line, the number, the length and the body, so it detects a record that was moved to
another file, has another number, or has a flipped bit. A record is written with one call. A record that a kill left
incomplete fails its checksum. That record and everything after it is removed, and the work is done again. If other
records follow the incomplete one, the file was damaged, and a line is printed.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from scoremode.core.reading import open_regular
from scoremode.core.strict_json import parse
from scoremode.errors import RunError, print_line

Buffer = bytes | memoryview

HEAD = struct.Struct("<4sQII")
MAGIC = b"scm2"
LONGEST_HEADER = 1 << 20
MANY = 1 << 20  # bytes; a longer record is compared with the length of the file before it is read
SEARCHED = 1 << 24  # bytes after an incomplete record that are searched for other records


class RecordFile:
    """The records of one computation. The caller must hold a lock, because two writers would mix their records."""

    any_kept: ClassVar[bool] = False  # has this process written a record? The line on Ctrl-C says so

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        """Creates the file, or opens it to resume. Raises RunError if it belongs to another computation."""
        self.path = path
        line = first_line(header)
        self._seed = zlib.crc32(line)
        self._file = path.open("a+b", buffering=0)
        try:
            beginning = os.pread(self._file.fileno(), len(line), 0)
            if beginning != line:
                if beginning and not line.startswith(beginning):
                    message = f"{path} belongs to another computation, or to another version of scoremode"
                    raise RunError(message, fix="give another --out, or --fresh to begin again")
                self._file.truncate(0)
                self._write(line)
        except BaseException:
            self._file.close()
            raise
        self._start = self.end = len(line)

    def replay(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields each complete record in order as (number, offset, body), then truncates the file after the last."""
        self.end = self._start
        while (record := self._read(self.end)) is not None:
            number, body = record
            at, self.end = self.end, self.end + HEAD.size + len(body)
            yield number, at, body
        # a kill leaves nothing after an incomplete record
        if MAGIC in os.pread(self._file.fileno(), SEARCHED, self.end + len(MAGIC)):
            print_line(f"scoremode: {self.path} is damaged after byte {self.end}: what followed is done again")
        self._file.truncate(self.end)

    def append(self, number: int, *parts: Buffer) -> int:
        """Writes a record whose body is these parts. Returns its offset in the file."""
        at, length = self.end, sum(memoryview(part).nbytes for part in parts)
        head = HEAD.pack(MAGIC, number, length, self._checksum(number, length, parts))
        self._write(head, *parts)
        RecordFile.any_kept = True
        self.end = at + HEAD.size + length
        return at

    def body(self, at: int, number: int) -> bytes:
        """Returns the body of the record at an offset from ``replay`` or ``append``. Raises RunError if it changed."""
        record = self._read(at)
        if record is None or record[0] != number:
            raise RunError(f"{self.path} was changed while it was in use", fix="run the same command again to resume")
        return record[1]

    def close(self) -> None:
        self._file.close()

    def _read(self, at: int) -> tuple[int, bytes] | None:
        head = os.pread(self._file.fileno(), HEAD.size, at)
        if len(head) < HEAD.size:
            return None
        magic, number, length, checksum = HEAD.unpack(head)
        if magic != MAGIC or (length > MANY and length > os.fstat(self._file.fileno()).st_size):
            return None  # a damaged length must not make us allocate so much memory
        body = os.pread(self._file.fileno(), length, at + HEAD.size)
        whole = len(body) == length and checksum == self._checksum(number, length, (body,))
        return (number, body) if whole else None

    def _checksum(self, number: int, length: int, parts: Sequence[Buffer]) -> int:
        checksum = zlib.crc32(struct.pack("<QI", number, length), self._seed)
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        return checksum

    def _write(self, *parts: Buffer) -> None:
        if os.writev(self._file.fileno(), parts) != sum(memoryview(part).nbytes for part in parts):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def first_line(header: Mapping[str, object]) -> bytes:
    """Returns a record file without records, as bytes."""
    return json.dumps(header, sort_keys=True, allow_nan=False).encode() + b"\n"


def is_record_file(path: Path, header: Mapping[str, object]) -> bool:
    """Does this file have a header like this one besides an identity, in any format, and then records or nothing?

    A kill may have cut the header.
    """
    with open_regular(path) as file:
        line, end, rest = file.read(LONGEST_HEADER).partition(b"\n")
    beginning = first_line(header)[:-2]
    if not end:
        return line.startswith(beginning) or beginning.startswith(line)
    try:
        fields = parse(line)
    except ValueError:
        return False
    is_header = isinstance(fields, dict) and isinstance(fields.get("identity"), dict) and fields.keys() >= header.keys()
    # after a power cut, the end of a file may be zeros
    return is_header and (rest.startswith((MAGIC, b"\0")) or MAGIC.startswith(rest))


def has_records(path: Path) -> bool:
    """Does a file contain records, perhaps damaged ones?"""
    with suppress(OSError), open_regular(path) as file:
        return MAGIC in file.read(LONGEST_HEADER)
    return False


def identity_in(path: Path) -> dict[str, Any] | None:
    """Returns the identity in the header of a record file; None if there is none that can be read."""
    try:
        with open_regular(path) as file:
            header = parse(file.readline(LONGEST_HEADER))
    except (OSError, ValueError):
        return None
    identity = header.get("identity") if isinstance(header, dict) else None
    return identity if isinstance(identity, dict) else None
