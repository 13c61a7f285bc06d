"""Writes a reference: a baseline's final hidden states for every target, bit for bit, and its head once.

DIR/states-00000.safetensors, …   tensor "states" (rows, width) of consecutive targets, in plan order
DIR/head.safetensors              tensor "weight" (padded vocabulary, width), and "bias" if the model has one
DIR/reference.json                the manifest with the sha256 of every file; written last, when all is complete
DIR/partial.rows                  until the run is saved: its identity, the layout of the shards, and a record for rows
                                  that are written: number = first row; body = number of rows, crc32; then a record for
                                  each window of the noise floor: number = NOISE + window; body = its KL

Rows are raw: float16 and float32 as in NumPy, bfloat16 as uint16 bit patterns.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from scoremode.core.cache.units import size_words
from scoremode.core.disk.files import disk_errors, file_sha256, write_at, written_atomically
from scoremode.core.disk.folders import HEAD, REFERENCE, ROWS, give_another, is_reference_file, shard_name
from scoremode.core.disk.manifests import write_sealed
from scoremode.core.disk.records import RecordFile
from scoremode.core.references.format import (
    FORMAT,
    RAW_DTYPES,
    ROWS_HEADER,
    HeadManifest,
    ReferenceManifest,
    ShardLayout,
)
from scoremode.core.references.reader import Reference, bytes_of, rows_checksum
from scoremode.core.scores.answers import FAULT
from scoremode.errors import EngineError, InputError, RunError
from scoremode.values import Bools, Floats, Ints, Raw

SHARD_BYTES = 1 << 30
ROW_RECORD = struct.Struct("<QI")  # rows, crc32
NOISE = 1 << 60  # in numbers of records


class MeasuredNoise(dict[int, Floats]):
    """The KL (targets,) of windows of the noise floor. What is added is recorded at once."""

    def __init__(self, record: Callable[[int, memoryview], object]) -> None:
        super().__init__()
        self._record = record

    def __setitem__(self, window: int, kl: Floats) -> None:
        super().__setitem__(window, kl)
        self._record(NOISE + window, np.ascontiguousarray(kl, "<f8").data)


def require_disk(folder: Path, size: int) -> None:
    """Refuses a reference of ``size`` bytes before anything is scored if the disk has less left for it."""
    with disk_errors(folder):
        written = sum(path.stat().st_blocks * 512 for path in folder.iterdir() if is_reference_file(path.name))
        left = shutil.disk_usage(folder).free
    if size - written > left:
        raise RunError(
            f"the hidden states take about {size_words(size)} of disk, and {folder} has {size_words(left)} left",
            fix=f"free some space, score less text, or {give_another(folder)}",
        )


class StatesWriter:
    """Writes a reference's rows in any order, and resumes after a kill.

    Call ``write`` before a window's scores are added to the journal. After a resume, windows of the journal whose rows
    are incomplete here must be scored again: ``run.forget_except(writer.complete_windows(offsets))``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        targets: int,
        width: int,
        dtype: str,
        identity: Mapping[str, object],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if dtype not in RAW_DTYPES:
            raise InputError(f"a reference cannot keep {dtype} states", fix=f"give --dtype {' or '.join(RAW_DTYPES)}")
        self.folder, self.identity = Path(folder), identity
        row_bytes = width * RAW_DTYPES[dtype].itemsize
        sizes = {"targets": targets, "width": width, "rows_per_shard": max(1, shard_bytes // row_bytes)}
        self.layout = msgspec.convert({**sizes, "dtype": dtype}, ShardLayout)
        self.present: Bools = np.zeros(targets, dtype=np.bool_)
        self.noise = MeasuredNoise(self._record)
        self._head: HeadManifest | None = None  # when it is written
        header = {**ROWS_HEADER, "identity": identity, "layout": msgspec.to_builtins(self.layout)}
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._rows = RecordFile(self.folder / ROWS, header)
            self._begin()

    def _begin(self) -> None:
        """Makes the files of all rows. After a kill, only rows that match their checksums count as written."""
        (self.folder / REFERENCE).unlink(missing_ok=True)  # written again when the run is complete
        for shard in range(self.layout.shard_count):
            path, form = self.folder / shard_name(shard), self.layout.shard_file(shard)
            if form.problem(path):
                with path.open("wb") as file:
                    file.write(form.header)
                    file.truncate(form.size)
        for first, _, body in self._rows.replay():
            if first >= NOISE:
                self.noise.update({first - NOISE: np.frombuffer(body, "<f8")})
                continue
            count, checksum = ROW_RECORD.unpack(body)
            self.present[first : first + count] = rows_checksum(self.folder, self.layout, first, count) == checksum

    def _record(self, number: int, body: memoryview) -> None:
        with disk_errors(self.folder):
            self._rows.append(number, body)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def complete_windows(self, target_offsets: Ints) -> Bools:
        """Returns, for each window of a plan's ``target_offsets``, whether all its rows are written."""
        holes = np.concatenate([[0], np.cumsum(~self.present, dtype=np.int64)])
        whole: Bools = holes[target_offsets[1:]] == holes[target_offsets[:-1]]
        return whole

    def write(self, first_target: int, rows: Raw) -> None:
        """Writes rows, and records that they are written."""
        raw, layout = RAW_DTYPES[self.layout.dtype], self.layout
        if rows.ndim != 2 or rows.shape[1] != layout.width or rows.dtype != raw:
            raise EngineError(
                f"the engine gave states of {rows.dtype} {rows.shape}; {layout.dtype} needs {raw} (n, {layout.width})",
                fix=FAULT,
            )
        if not 0 <= first_target <= first_target + len(rows) <= layout.targets:
            raise EngineError(
                f"the engine gave states of targets {first_target} to {first_target + len(rows)} of {layout.targets}",
                fix=FAULT,
            )
        data = bytes_of(rows)
        with disk_errors(self.folder):
            for shard, offset, before, n in layout.pieces(first_target, len(rows)):
                first, part = first_target + before, data[before * layout.row_bytes :][: n * layout.row_bytes]
                with (self.folder / shard_name(shard)).open("r+b", buffering=0) as file:
                    write_at(file.fileno(), part, offset)
                # the operating system has the rows now, so a later kill loses none
                self._rows.append(first, ROW_RECORD.pack(n, zlib.crc32(part)))
                self.present[first : first + n] = True

    # ── head ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def write_head(
        self, weight: Raw, bias: Raw | None, *, scale: float, softcap: float | None, vocabulary: int
    ) -> None:
        """Writes the head: its matrix (padded vocabulary, width) and its bias (padded vocabulary,)."""
        head = {
            "file": HEAD,
            "rows": len(weight),
            "dtype": _dtype_of(weight),
            "has_bias": bias is not None,
            "bias_dtype": None if bias is None else _dtype_of(bias),
            "vocabulary": int(vocabulary),
            "scale": float(scale),
            "softcap": softcap and float(softcap),
            "sha256": "0" * 64,  # when all is written
        }
        head_manifest = msgspec.convert(head, HeadManifest)
        with disk_errors(self.folder), written_atomically(self.folder / HEAD) as file:
            file.write(head_manifest.as_file(self.layout.width).header)
            file.write(bytes_of(weight))
            file.write(b"" if bias is None else bytes_of(bias))
        self._head = head_manifest

    # ── finish ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self, manifest: Mapping[str, object]) -> Reference:
        """Hashes every file, writes reference.json, and opens the complete reference.

        ``manifest`` has at least plan_digest, method, model_fingerprint, tokenizer (its fingerprint) and engine (a
        dict of facts); method_settings, corpus and corpus_sha256 make later error messages more precise.
        """
        missing = np.flatnonzero(~self.present)
        if len(missing):
            raise RunError(
                f"{self.folder} lacks the states of {len(missing)} targets, the first is {missing[0]}",
                fix="run the same command again to resume",
            )
        assert self._head is not None, "the head is written before"
        with disk_errors(self.folder):
            shards = [
                {"file": name, "rows": self.layout.shard_range(shard)[1], "sha256": self._sha256(name)}
                for shard, name in enumerate(map(shard_name, range(self.layout.shard_count)))
            ]
            whole = {
                "vocabulary": self._head.vocabulary,
                **manifest,
                "format": FORMAT,
                **msgspec.to_builtins(self.layout),
                "shards": shards,
                "head": {**msgspec.to_builtins(self._head), "sha256": self._sha256(HEAD)},
                "identity": self.identity,
            }
            write_sealed(self.folder / REFERENCE, whole, ReferenceManifest)
        return Reference.open(self.folder, verify=False)

    def _sha256(self, name: str) -> str:
        """Returns the hash of a file, which is flushed to disk first."""
        with (self.folder / name).open("rb", buffering=0) as file:
            os.fsync(file.fileno())
        return file_sha256(self.folder / name)

    def close(self) -> None:
        """Closes the file of records; rows that were written stay on disk."""
        self._rows.close()

    def __enter__(self) -> StatesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dtype_of(rows: Raw) -> str:
    for name, raw in RAW_DTYPES.items():
        if rows.dtype == raw:
            return name
    raise EngineError(f"the engine gave a head of {rows.dtype}", fix=FAULT)
