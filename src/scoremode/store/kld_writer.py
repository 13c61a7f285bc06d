"""Write llama.cpp's file of base logits (``.kld``) chunk by chunk, in any order; a killed writer loses nothing.

While it is being written, the file has its final size but no magic number at its beginning, so nobody takes it for a
whole one. A chunk is on disk before the caller notes that it is done.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np

from scoremode.errors import EngineError, RunError
from scoremode.store.kld import MAGIC, KldLayout, steps_and_lowest
from scoremode.values import Bools, Ids, Raw


class KldWriter:
    """The records of chunks on their way into a file. The caller holds a lock."""

    def __init__(self, path: Path, layout: KldLayout, tokens: Ids) -> None:
        """Create the file, or open it to resume if its sizes and tokens are the same."""
        assert tokens.shape == (layout.chunks, layout.context)
        self.path, self.layout = path, layout
        start = layout.header()[len(MAGIC) :] + np.ascontiguousarray(tokens, "<i4").tobytes()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            there = os.fstat(self._file).st_size == layout.size
            if not there or os.pread(self._file, len(start), len(MAGIC)) != start:
                os.ftruncate(self._file, 0)
                self._write(bytes(len(MAGIC)) + start, 0)
                os.ftruncate(self._file, layout.size)
        except OSError as error:
            raise self._refusal(error) from None

    def complete_chunks(self) -> Bools:
        """Which chunks are there: an absent record is all zeros, and no record has 0 as its least log-probability.

        Records are read, not mapped: on a full tmpfs, touching a mapped hole ends the process.
        """
        step = 2 * self.layout.words
        found = np.zeros(self.layout.chunks, np.bool_)
        for chunk in range(self.layout.chunks):
            begin = self.layout.offset(chunk)
            starts = (os.pread(self._file, 8, at) for at in range(begin, begin + step * self.layout.rows, step))
            found[chunk] = all(struct.unpack("<2f", start)[1] < 0 for start in starts)
        return found

    def write(self, chunk: int, records: Raw) -> None:
        """Write the records (rows, words) of a chunk, and wait until they are on disk."""
        assert records.shape == (self.layout.rows, self.layout.words)
        assert records.dtype == np.uint16
        scale, lowest = steps_and_lowest(records)
        if not (np.isfinite(scale) & (scale >= 0) & np.isfinite(lowest) & (lowest < 0)).all():
            raise EngineError(
                f"the distributions of chunk {chunk} cannot be kept: a logit is NaN or infinite",
                fix="try --dtype float32; if it stays, the weights are damaged",
            )
        try:
            self._write(np.ascontiguousarray(records).data, self.layout.offset(chunk))
            os.fsync(self._file)
        except OSError as error:
            raise self._refusal(error) from None

    def finish(self, target: Path) -> None:
        """Write the magic number and rename the file to ``target``; RunError if a chunk is missing."""
        missing = int((~self.complete_chunks()).sum())
        if missing:
            raise RunError(f"{self.path} lacks {missing} of {self.layout.chunks} chunks", fix="give --fresh")
        try:
            self._write(MAGIC, 0)
            os.fsync(self._file)
            os.replace(self.path, target)
        except OSError as error:
            raise self._refusal(error) from None

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> KldWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes | memoryview, at: int) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written

    def _refusal(self, error: OSError) -> RunError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space and run the same command again to resume" if full else "give another file to --kld"
        return RunError(f"{self.path} cannot be written ({error.strerror})", fix=fix)
