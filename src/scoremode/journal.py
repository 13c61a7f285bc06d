"""Scores on their way to disk, one record a window, so that a killed run loses only what was in flight.

file    = one line of JSON (what is being scored), then records
record  = magic, window, targets, crc32 of what follows | seconds | logprob rank entropy top top_logprob [kl]

A record is written in one piece. What a kill leaves half-written fails its checksum; it and everything after it is
cut off, and those windows are scored again. Scores are not held in memory beside the file: ``rows`` reads them back.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.errors import RunError
from scoremode.types import Answers, Bools, Floats, Ints, Plan, Scores

HEAD = struct.Struct("<4sIII")
SECONDS = struct.Struct("<d")
MAGIC = b"scor"
COLUMNS = (("logprob", "<f8"), ("rank", "<i8"), ("entropy", "<f8"), ("top", "<i4"), ("top_logprob", "<f8"))
KL = ("kl", "<f8")


class Journal:
    """Scores so far of one plan, kept in one file that one process holds."""

    def __init__(self, path: Path, identity: dict[str, Any], plan: Plan, *, with_kl: bool = False) -> None:
        self.plan = plan
        self.kl: Floats | None = np.full(plan.targets, np.nan) if with_kl else None
        self.columns = (*COLUMNS, KL) if with_kl else COLUMNS
        self.row_bytes = sum(np.dtype(dtype).itemsize for _, dtype in self.columns)
        self.done: Bools = np.zeros(len(plan), dtype=np.bool_)
        self._at: Ints = np.zeros(len(plan), dtype=np.int64)  # where in the file each window's last record begins
        self.seconds = 0.0
        self.path = path
        self.file = path.open("a+b", buffering=0)
        _lock(self.file, path)
        self._begin_or_resume(json.dumps(identity, sort_keys=True).encode() + b"\n")

    def _begin_or_resume(self, header: bytes) -> None:
        self.file.seek(0)
        if self.file.read(len(header)) != header:
            # a header that is not ours was refused before; this one is new, or was cut short while being written
            self.file.truncate(0)
            self.file.write(header)
            self._end = len(header)
            return
        self._end = len(header)
        while self._take_record():
            pass
        self.file.truncate(self._end)
        self.file.seek(0, os.SEEK_END)

    def _take_record(self) -> bool:
        """Take in the record at the end of what is known; False where there is no whole one that fits."""
        head = os.pread(self.file.fileno(), HEAD.size, self._end)
        if len(head) < HEAD.size:
            return False
        magic, window, targets, _ = HEAD.unpack(head)
        if magic != MAGIC or window >= len(self.plan) or targets != self.plan.target_counts[window]:
            return False
        body = self._body(self._end, targets)
        if body is None:
            return False
        self._know(window, body)
        return True

    def _body(self, at: int, targets: int) -> bytes | None:
        """What stands behind the head of a record; None where that is not what was written."""
        size = HEAD.size + SECONDS.size + targets * self.row_bytes
        record = os.pread(self.file.fileno(), size, at)
        body = record[HEAD.size :]
        whole = len(record) == size and zlib.crc32(body) == HEAD.unpack_from(record)[3]
        return body if whole else None

    def _know(self, window: int, body: bytes) -> None:
        """The record at the end of what is known is this window's."""
        self.seconds += SECONDS.unpack_from(body)[0]
        self._at[window] = self._end
        self.done[window] = True
        self._end += HEAD.size + len(body)
        if self.kl is not None:
            begin, end = self.plan.target_offsets[window : window + 2]
            last_column = len(body) - (end - begin) * self.kl.itemsize
            self.kl[begin:end] = np.frombuffer(body, KL[1], offset=int(last_column))

    def add(self, window: int, answers: Answers, seconds: float, kl: Floats | None = None) -> None:
        """Keep a window's scores."""
        columns = [answers.logprob[:, 0], answers.rank[:, 0], answers.entropy, answers.top, answers.top_logprob]
        columns += [] if kl is None else [kl]
        body = SECONDS.pack(seconds) + b"".join(
            np.ascontiguousarray(column, dtype=dtype).tobytes()
            for column, (_, dtype) in zip(columns, self.columns, strict=True)
        )
        record = HEAD.pack(MAGIC, window, len(answers.entropy), zlib.crc32(body)) + body
        written = self.file.write(record)
        if written != len(record):
            raise OSError(28, "No space left on device")
        self._know(window, body)

    def rows(self, begin: int, end: int) -> Scores:
        """The scores of some consecutive targets, those of whole windows; NaN where there is none yet."""
        offsets = self.plan.target_offsets
        found = Scores.empty(end - begin)
        for window in range(*np.searchsorted(offsets, (begin, end)).tolist()):
            if self.done[window]:
                self._read_into(found, int(offsets[window]) - begin, window)
        return found

    def _read_into(self, found: Scores, row: int, window: int) -> None:
        at, n = int(self._at[window]), int(self.plan.target_counts[window])
        body = self._body(at, n)
        if body is None:
            raise RunError(f"{self.path} was changed while it was in use", fix="repeat the command; it goes on")
        place = SECONDS.size
        for name, dtype in COLUMNS:
            getattr(found, name)[row : row + n] = np.frombuffer(body, dtype, n, place)
            place += n * np.dtype(dtype).itemsize

    def close(self) -> None:
        self.file.close()


def _lock(file: io.FileIO, path: Path) -> None:
    """Hold the journal until the file is closed, by us or by the end of the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(
            f"another process is scoring into {path.parent}", fix="wait for it, or give another --out"
        ) from None


def require_unlocked(path: Path) -> None:
    """Refuse a journal that another process is writing."""
    with path.open("r+b", buffering=0) as file:
        _lock(file, path)


def read_identity(path: Path) -> dict[str, Any] | None:
    """What a journal says it is scoring; None where even that was not written whole."""
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
