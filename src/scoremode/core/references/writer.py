"""Writes a reference: a baseline's final hidden states for every target, bit for bit, and its head once.

DIR/states-00000.safetensors, …   tensor "states" (rows, width) of consecutive targets, in plan order
DIR/head.safetensors              tensor "weight" (padded vocabulary, width), and "bias" if the model has one
DIR/reference.json                the manifest with the sha256 of every file; written last, when all is complete
DIR/partial.reference.json        while unfinished: the identity of the run, and the layout of the shards
DIR/partial.rows                  while unfinished: which rows are written, and their checksums

Rows are raw: float16 and float32 as in NumPy, bfloat16 as uint16 bit patterns.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from scoremode.core.disk.files import DISK_FULL, file_sha256, write_at, write_atomically, written_atomically
from scoremode.core.disk.folders import HEAD, PARTIAL, REFERENCE, ROWS, SHARD_NAME, give_another, shard_name
from scoremode.core.disk.manifests import differing_fields, sealed
from scoremode.core.references.format import (
    DATA_START,
    FORMAT,
    MOST_ROWS,
    RAW_DTYPES,
    WIDEST,
    ShardLayout,
    discard,
    head_file,
    head_problem,
    manifest_problem,
    read_partial,
    write_partial,
)
from scoremode.core.references.reader import Reference, bytes_of, packed_record, row_records, rows_checksum
from scoremode.core.scores.answers import FAULT
from scoremode.errors import EngineError, InputError, RunError
from scoremode.values import Bools, Ints, Raw

SHARD_BYTES = 1 << 30
NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class StatesWriter:
    """Writes a reference's rows in any order, and resumes after a kill.

    Call ``write`` and ``flush`` before a window's scores are added to the journal. After a resume, windows of the
    journal whose rows are incomplete here must be scored again: ``journal.done &= writer.complete_windows(offsets)``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        targets: int,
        width: int,
        dtype: str,
        identity: Mapping[str, Any],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if dtype not in RAW_DTYPES:
            raise InputError(f"a reference cannot keep {dtype} states", fix=f"give --dtype {' or '.join(RAW_DTYPES)}")
        assert 0 <= targets <= MOST_ROWS, "targets out of range"
        assert 0 < width <= WIDEST, "width out of range"
        self.folder = Path(folder)
        row_bytes = width * RAW_DTYPES[dtype].itemsize
        self.layout = ShardLayout(targets, width, dtype, max(1, shard_bytes // row_bytes))
        self.identity: dict[str, Any] = json.loads(json.dumps(identity, sort_keys=True, allow_nan=False))
        self.present: Bools = np.zeros(targets, dtype=np.bool_)
        self._head: dict[str, Any] | None = None  # the description of the head, if it was written
        self._pending: list[bytes] = []  # records of rows that were written since the last flush
        self._shard: tuple[int, BinaryIO] | None = None  # the last shard stays open for the next write
        with disk_errors(self.folder):
            is_finished = self._is_finished()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._rows = (self.folder / ROWS).open("a+b", buffering=0)
        try:
            known = None if is_finished else read_partial(self.folder)
            if is_finished:
                self._reopen()
            elif known is not None and known["ready"]:
                self._resume(known)
            else:
                self._begin()  # there are no rows yet, at most their space
        except BaseException:
            self.close()
            raise

    # ── begin or resume ──────────────────────────────────────────────────────────────────────────────────────────────
    def _is_finished(self) -> bool:
        """Does the folder contain this reference, finished? Raises RunError if it contains another one."""
        if not (self.folder / REFERENCE).exists():
            return False
        found = Reference.open(self.folder)
        if found.manifest["identity"] != self.identity or found.layout != self.layout:
            raise RunError(
                f"{self.folder} contains another, finished reference",
                fix="give another --out, or --fresh to replace it",
            )
        return True

    def _reopen(self) -> None:
        """Turns a finished reference into an unfinished one that has all its rows.

        The reference's run may be unfinished, if the process was killed after reference.json but before the run's own
        manifest was written. The states must not be lost then.
        """
        self._rows.truncate(0)
        for shard in range(self.layout.shards):
            first, count = self.layout.shard_range(shard)
            self._record(first, count, rows_checksum(self.folder, self.layout, first, count))
        self.flush()
        with disk_errors(self.folder):
            write_partial(self.folder, self.identity, self.layout, ready=True)
            (self.folder / REFERENCE).unlink()

    def _resume(self, known: Mapping[str, Any]) -> None:
        """Finds the rows that are written: those whose bytes still match their checksum."""
        theirs = {**known["identity"], **known["layout"]}
        differing = differing_fields({**self.identity, **msgspec.to_builtins(self.layout)}, theirs)
        if differing:
            raise RunError(
                f"{self.folder} contains another unfinished reference (it differs in: {differing})",
                fix="give another --out, or --fresh to replace it",
            )
        for shard in range(self.layout.shards):
            path = self.folder / shard_name(shard)
            problem = self.layout.shard_file(shard).problem(path)
            if problem:
                raise RunError(f"{path} {problem}", fix="start again with --fresh")
        self._rows.seek(0)
        records, end = row_records(self._rows.read() or b"", self.layout)
        self._rows.truncate(end)
        for first, count, checksum in records:
            is_whole = rows_checksum(self.folder, self.layout, first, count) == checksum
            self.present[first : first + count] = is_whole

    def _begin(self) -> None:
        """Allocates space for every row now, so that a full disk is detected before an hour of scoring."""
        for path in self.folder.iterdir():
            if SHARD_NAME.fullmatch(path.name):
                path.unlink()
        needed = self.layout.shards * DATA_START + self.layout.targets * self.layout.row_bytes
        try:
            with disk_errors(self.folder, needed):
                self._rows.truncate(0)
                write_partial(self.folder, self.identity, self.layout, ready=False)
                for shard in range(self.layout.shards):
                    self._allocate(shard)
                write_partial(self.folder, self.identity, self.layout, ready=True)
        except BaseException:
            discard(self.folder)
            raise

    def _allocate(self, shard: int) -> None:
        """Creates a shard with all its space allocated, so that a later write cannot find the disk full."""
        size, header = self.layout.shard_file(shard)
        with (self.folder / shard_name(shard)).open("wb", buffering=0) as file:
            write_at(file.fileno(), header, 0)
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except (AttributeError, OSError) as error:  # not supported everywhere; a full disk is then detected later
                if isinstance(error, OSError) and error.errno not in NO_PREALLOCATION:
                    raise
                file.truncate(size)
            os.fsync(file.fileno())

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def complete_windows(self, target_offsets: Ints) -> Bools:
        """Returns, for each window of a plan's ``target_offsets``, whether all its rows are written."""
        holes = np.concatenate([[0], np.cumsum(~self.present, dtype=np.int64)])
        whole: Bools = holes[target_offsets[1:]] == holes[target_offsets[:-1]]
        return whole

    def write(self, first_target: int, rows: Raw) -> None:
        raw, layout = RAW_DTYPES[self.layout.dtype], self.layout
        if rows.ndim != 2 or rows.shape[1] != layout.width or rows.dtype != raw:
            raise EngineError(
                f"the engine gave states of {rows.dtype} {rows.shape}, not {layout.dtype} as {raw} (n, {layout.width})",
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
                part = data[before * layout.row_bytes :][: n * layout.row_bytes]
                write_at(self._opened(shard), part, offset)
                self._record(first_target + before, n, zlib.crc32(part))

    def _record(self, first: int, count: int, checksum: int) -> None:
        self._pending.append(packed_record(first, count, checksum))
        self.present[first : first + count] = True

    def _opened(self, shard: int) -> int:
        if self._shard is None or self._shard[0] != shard:
            self._close_shard()
            path = self.folder / shard_name(shard)
            self._shard = (shard, path.open("r+b", buffering=0))
        return self._shard[1].fileno()

    def flush(self) -> None:
        """Records which rows were written. The operating system already has the rows, so a later kill loses none."""
        records = b"".join(self._pending)
        with disk_errors(self.folder):
            end = self._rows.seek(0, os.SEEK_END)
            if self._rows.write(records) != len(records):
                self._rows.truncate(end)  # an incomplete record would hide all records after it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._pending.clear()

    # ── head ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def write_head(
        self, weight: Raw, bias: Raw | None, *, scale: float, softcap: float | None, vocabulary: int
    ) -> None:
        """Writes the head: its matrix (padded vocabulary, width) and its bias (padded vocabulary,)."""
        assert weight.ndim == 2, "a head is a matrix"
        assert weight.shape[1] == self.layout.width, "a head must be as wide as the states"
        assert bias is None or bias.shape == weight.shape[:1], "a bias must have one number per row"
        head = {
            "file": HEAD,
            "rows": len(weight),
            "dtype": _dtype_of(weight),
            "has_bias": bias is not None,
            "bias_dtype": None if bias is None else _dtype_of(bias),
            "vocabulary": int(vocabulary),
            "scale": float(scale),
            "softcap": softcap and float(softcap),
        }
        assert head_problem(head) is None, f"an invalid head: {head_problem(head)}"
        with disk_errors(self.folder), written_atomically(self.folder / HEAD) as file:
            file.write(head_file(head, self.layout.width).header)
            file.write(bytes_of(weight))
            file.write(b"" if bias is None else bytes_of(bias))
        self._head = head

    # ── finish ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self, manifest: Mapping[str, Any]) -> Reference:
        """Hashes every file, writes reference.json, and opens the complete reference.

        ``manifest`` has at least plan_digest, method, model_fingerprint, tokenizer (its fingerprint) and engine (a
        dict of facts); method_settings, corpus and corpus_sha256 make later error messages more precise.
        """
        self.flush()
        missing = np.flatnonzero(~self.present)
        if len(missing):
            raise RunError(
                f"{self.folder} lacks the states of {len(missing)} targets, the first is {missing[0]}",
                fix="run the same command again to resume",
            )
        assert self._head is not None, "write_head must be called before finish"
        self._close_shard()
        with disk_errors(self.folder):
            shards = [
                {"file": name, "rows": self.layout.shard_range(shard)[1], "sha256": self._sha256(name)}
                for shard, name in enumerate(map(shard_name, range(self.layout.shards)))
            ]
            found = {
                "vocabulary": self._head["vocabulary"],
                **manifest,
                "format": FORMAT,
                **msgspec.to_builtins(self.layout),
                "shards": shards,
                "head": {**self._head, "sha256": self._sha256(HEAD)},
                "identity": self.identity,
            }
            complete = sealed(json.loads(json.dumps(found, allow_nan=False)))  # as it is read again: tuples are lists
            assert manifest_problem(complete) is None, f"an invalid manifest: {manifest_problem(complete)}"
            write_atomically(self.folder / REFERENCE, json.dumps(complete, indent=1, allow_nan=False).encode())
            self.close()
            for name in (ROWS, PARTIAL):
                (self.folder / name).unlink(missing_ok=True)
        return Reference.open(self.folder, verify=False)

    def _sha256(self, name: str) -> str:
        """Returns the hash of a file, which is flushed to disk first."""
        with (self.folder / name).open("rb", buffering=0) as file:
            os.fsync(file.fileno())
        return file_sha256(self.folder / name)

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard[1].close()
            self._shard = None

    def close(self) -> None:
        """Closes the files; flushed rows stay on disk."""
        self._close_shard()
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


@contextmanager
def disk_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turns OSError into RunError with a message of one line; ``needed`` bytes are mentioned if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise RunError(
                f"{folder} cannot be written ({error.strerror or error})", fix=give_another(folder)
            ) from None
        sizes = ""
        with suppress(OSError):
            free = f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free"
            sizes = f" ({free})" if needed is None else f" (the states take {needed / 1e9:.2f} GB, {free})"
        fix = "free some space and run the same command again to resume, or give another --out"
        raise RunError(f"the disk of {folder} is full{sizes}", fix=fix) from None
