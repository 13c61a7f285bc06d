"""Scores on their way to disk, one record a window, so that a killed run loses only what was in flight.

file    = one line of JSON (what is being scored), then records
record  = magic, window, targets, crc32 of what follows | seconds | logprob rank entropy top top_logprob [kl]

A record is written in one piece. What a kill leaves half-written fails its checksum; it and everything after it is
cut off, and those windows are scored again.
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
from scoremode.types import Answers, Bools, Floats, Plan, Scores

HEAD = struct.Struct("<4sIII")
SECONDS = struct.Struct("<d")
MAGIC = b"scor"
COLUMNS = (("logprob", "<f8"), ("rank", "<i8"), ("entropy", "<f8"), ("top", "<i4"), ("top_logprob", "<f8"))
KL = ("kl", "<f8")


class Journal:
    """Scores so far of one plan, kept in one file that one process holds."""

    def __init__(self, path: Path, identity: dict[str, Any], plan: Plan, *, with_kl: bool = False) -> None:
        self.plan = plan
        self.scores = Scores.empty(plan.targets)
        self.kl: Floats | None = np.full(plan.targets, np.nan) if with_kl else None
        self.columns = (*COLUMNS, KL) if with_kl else COLUMNS
        self.row_bytes = sum(np.dtype(dtype).itemsize for _, dtype in self.columns)
        self.done: Bools = np.zeros(len(plan), dtype=np.bool_)
        self.seconds = 0.0
        self.path = path
        self.file = path.open("a+b", buffering=0)
        _lock(self.file, path)
        self._begin_or_resume(json.dumps(identity, sort_keys=True).encode() + b"\n")

    def _begin_or_resume(self, header: bytes) -> None:
        self.file.seek(0)
        data = self.file.read()
        if not data.startswith(header):
            # a header that is not ours was refused before; this one is new, or was cut short while being written
            self.file.truncate(0)
            self.file.write(header)
            return
        self.file.truncate(self._read_records(data, len(header)))
        self.file.seek(0, os.SEEK_END)

    def _read_records(self, data: bytes, at: int) -> int:
        """Take in every whole record; the offset behind the last one."""
        while at + HEAD.size <= len(data):
            magic, window, targets, checksum = HEAD.unpack_from(data, at)
            body = data[at + HEAD.size : at + HEAD.size + SECONDS.size + targets * self.row_bytes]
            whole = len(body) == SECONDS.size + targets * self.row_bytes and zlib.crc32(body) == checksum
            fits = window < len(self.plan) and targets == self.plan.target_counts[window]
            if magic != MAGIC or not whole or not fits:
                break
            self._take(window, body)
            at += HEAD.size + len(body)
        return at

    def _take(self, window: int, body: bytes) -> None:
        begin, end = self.plan.target_offsets[window : window + 2]
        self.seconds += SECONDS.unpack_from(body)[0]
        at, n = SECONDS.size, int(end - begin)
        for name, dtype in self.columns:
            column: Any = self.kl if name == "kl" else getattr(self.scores, name)
            column[begin:end] = np.frombuffer(body, dtype, n, at)
            at += n * np.dtype(dtype).itemsize
        self.done[window] = True

    def add(self, window: int, answers: Answers, seconds: float, kl: Floats | None = None) -> None:
        """Keep a window's scores, in memory and on disk."""
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
        self._take(window, body)

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
