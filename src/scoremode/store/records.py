"""Work on its way to disk as numbered, checksummed records, so that a killed process loses only what was in flight.

file    = one line of JSON: what is being computed
          records
record  = magic, number, bytes of the body, crc32 | body

The checksum covers the header line, the number, the length and the body: a record cannot move to another file, take
another number, or lose a bit without being noticed. A record is written in one piece. What a kill leaves half-written
fails its checksum; it and everything after it is cut off, and that work is done again.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scoremode.errors import RunError
from scoremode.text.json_files import parse

HEAD = struct.Struct("<4sQII")
MAGIC = b"scm2"
LONGEST_HEADER = 1 << 20


class RecordFile:
    """Records of one piece of work. The caller holds a lock: two writers would mix their records."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Begin the file, or open it to resume; RunError if it belongs to other work."""
        self.path = path
        line = json.dumps(header, sort_keys=True, allow_nan=False).encode() + b"\n"
        self._seed = zlib.crc32(line)
        self._file = path.open("a+b", buffering=0)
        try:
            found = os.pread(self._file.fileno(), len(line), 0)
            if found != line:
                if found and not line.startswith(found):
                    raise RunError(f"{path} belongs to other work", fix="give another --out, or --fresh")
                self._file.truncate(0)
                self._write(line)
        except BaseException:
            self._file.close()
            raise
        self._start = self.end = len(line)

    def replay(self) -> Iterator[tuple[int, int, bytes]]:
        """Every whole record in order as (number, its place, body); what follows the last whole one is cut off."""
        self.end = self._start
        while (found := self._read(self.end)) is not None:
            number, body = found
            at, self.end = self.end, self.end + HEAD.size + len(body)
            yield number, at, body
        self._file.truncate(self.end)

    def append(self, number: int, body: bytes) -> int:
        """Write a record; its place in the file."""
        at = self.end
        self._write(HEAD.pack(MAGIC, number, len(body), self._checksum(number, body)) + body)
        self.end = at + HEAD.size + len(body)
        return at

    def body(self, at: int, number: int) -> bytes:
        """The record that ``replay`` or ``append`` placed there; RunError if it is no longer the one written."""
        found = self._read(at)
        if found is None or found[0] != number:
            raise RunError(f"{self.path} was changed while it was in use", fix="run the same command again to resume")
        return found[1]

    def close(self) -> None:
        self._file.close()

    def _read(self, at: int) -> tuple[int, bytes] | None:
        head = os.pread(self._file.fileno(), HEAD.size, at)
        if len(head) < HEAD.size:
            return None
        magic, number, length, checksum = HEAD.unpack(head)
        if magic != MAGIC or length > os.fstat(self._file.fileno()).st_size:
            return None
        body = os.pread(self._file.fileno(), length, at + HEAD.size)
        whole = len(body) == length and checksum == self._checksum(number, body)
        return (number, body) if whole else None

    def _checksum(self, number: int, body: bytes) -> int:
        return zlib.crc32(body, zlib.crc32(struct.pack("<QI", number, len(body)), self._seed))

    def _write(self, data: bytes) -> None:
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_record_header(path: Path) -> dict[str, Any] | None:
    """What a record file says it holds; None if even that was not written whole."""
    with path.open("rb") as file:
        line = file.readline(LONGEST_HEADER)
    try:
        value = parse(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
