"""Write a reference: a baseline's final hidden states for every target, bit for bit, and its head once.

DIR/states-00000.safetensors, …   tensor "states" (rows, width) of consecutive targets, in plan order
DIR/head.safetensors              tensor "weight" (padded vocabulary, width), and "bias" if the model has one
DIR/reference.json                the manifest with the sha256 of every file; written last, so it means complete
DIR/partial.reference.json        while unfinished: the identity of the run, and the layout of the shards
DIR/partial.rows                  while unfinished: which rows are written (reference_rows.py)

Rows are raw: float16 and float32 as in NumPy, bfloat16 as uint16 bit patterns.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from scoremode.errors import EngineError, InputError, RunError, harmless
from scoremode.store.files import write_atomically
from scoremode.store.reference import Progress, Reference, bytes_of
from scoremode.store.reference_files import disk_errors, hash_files, make_shard, write_at
from scoremode.store.reference_folder import discard, require_free
from scoremode.store.reference_format import (
    DATA_START,
    FORMAT,
    HEAD,
    MOST_ROWS,
    PARTIAL,
    PARTIAL_HEAD,
    RAW_DTYPES,
    REFERENCE,
    ROWS,
    SHARD_NAME,
    WIDEST,
    ShardLayout,
    file_problem,
    head_fits,
    head_header,
    head_problem,
    manifest_problem,
    read_partial,
    shard_name,
)
from scoremode.store.reference_rows import checksum_of, packed, records_in
from scoremode.store.sealed import sealed
from scoremode.values import Bools, Ints, Raw

SHARD_BYTES = 1 << 30


class Elsewhere(Protocol):
    """Where complete shards go, so that they need not stay here."""

    def complete(self, name: str) -> None:
        """All rows of this shard are there, and recorded."""

    def needed(self, name: str) -> None:
        """This shard is about to be written: bring it back if it is no longer here."""

    def sha256(self, name: str) -> str | None:
        """The hash of a shard that is there; None of any other."""

    def settle(self) -> None:
        """Take no more shards: those that are here now stay."""

    def read(self, name: str, offset: int, place: memoryview) -> None:
        """Fill memory with bytes of a shard that is there."""


# ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        progress: Progress | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """``elsewhere`` takes complete shards; without it, space for all of them is allocated here at once."""
        if dtype not in RAW_DTYPES:
            raise InputError(f"a reference cannot keep {dtype} states", fix=f"give --dtype {' or '.join(RAW_DTYPES)}")
        assert 0 <= targets <= MOST_ROWS, "targets out of range"
        assert 0 < width <= WIDEST, "width out of range"
        self.folder = Path(folder)
        row_bytes = width * RAW_DTYPES[dtype].itemsize
        self.layout = ShardLayout(targets, width, dtype, max(1, shard_bytes // row_bytes))
        self.identity: dict[str, Any] = json.loads(json.dumps(identity, sort_keys=True, allow_nan=False))
        self.present: Bools = np.zeros(targets, dtype=np.bool_)
        self.head: dict[str, Any] | None = None  # what write_head stored; read from disk after a resume
        self.resumed = False
        self._pending: list[bytes] = []
        self._elsewhere, self._written = elsewhere, set[int]()
        self._shard: tuple[int, BinaryIO] | None = None  # the last shard stays open: most often the next write is there
        with disk_errors(self.folder):
            require_free(self.folder)
            self._require_same_if_finished()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._rows = (self.folder / ROWS).open("a+b", buffering=0)
        try:
            self._begin_or_resume(progress)
        except BaseException:
            self.close()
            raise

    def _require_same_if_finished(self) -> None:
        if not (self.folder / REFERENCE).exists():
            return
        if self._elsewhere is not None and (self.folder / ROWS).exists():
            (self.folder / REFERENCE).unlink()  # it was killed before its run was saved, and all rows are recorded
            return
        found = Reference.open(self.folder)
        if found.manifest["identity"] != self.identity or found.layout != self.layout:
            raise RunError(
                f"{self.folder} contains another, finished reference",
                fix="give another --out, or --fresh to replace it",
            )

    def _reopen_finished(self) -> None:
        """Turn a finished reference into an unfinished one that has all its rows.

        Its run may be unfinished, if the process was killed after reference.json but before the run's own manifest.
        The states must not be lost then.
        """
        found = Reference.open(self.folder, verify=False)  # already verified by _require_same_if_finished
        self.head = {name: value for name, value in found.manifest["head"].items() if name != "sha256"}
        self._rows.truncate(0)
        for shard in range(self.layout.shards):
            first, count = shard * self.layout.rows_per_shard, self.layout.shard_rows(shard)
            self._record(first, count, checksum_of(self.folder, self.layout, first, count))
        self.flush()
        with disk_errors(self.folder):
            self._write_partial(ready=True)
            (self.folder / REFERENCE).unlink()
        self.resumed = True

    def _begin_or_resume(self, progress: Progress | None) -> None:
        if (self.folder / REFERENCE).exists():
            self._reopen_finished()
            return
        known = read_partial(self.folder)
        if known is None or not known["ready"]:  # no rows yet: at most, space was allocated
            self._begin()
            return
        mine = {**self.identity, **self.layout.as_json()}
        theirs = {**known["identity"], **known["layout"]}
        differing = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
        if differing:
            raise RunError(
                f"{self.folder} contains another unfinished reference "
                f"(it differs in: {harmless(', '.join(differing))})",
                fix="give another --out, or --fresh to replace it",
            )
        for shard in range(self.layout.shards):
            path = self.folder / shard_name(shard)
            if self._elsewhere is not None and not path.exists():
                continue
            reason = file_problem(path, self.layout.shard_size(shard), self.layout.shard_header(shard))
            if reason:
                raise RunError(f"{path} {reason}", fix="start again with --fresh")
        self.resumed = True
        self._read_records(progress)
        if head_fits(self.folder, known.get("head"), self.layout.width):
            self.head = known["head"]

    def _begin(self) -> None:
        """Allocate space for every row now, so that a full disk is detected before an hour of scoring."""
        for path in self.folder.iterdir():
            if SHARD_NAME.fullmatch(path.name):
                path.unlink()
        needed = sum(self.layout.shard_size(shard) for shard in range(self.layout.shards))
        try:
            with disk_errors(self.folder, needed):
                self._rows.truncate(0)
                self._write_partial(ready=False)
                for shard in range(self.layout.shards if self._elsewhere is None else 0):
                    self._make(shard)
                self._write_partial(ready=True)
        except BaseException:
            discard(self.folder)
            raise

    def _make(self, shard: int) -> None:
        path = self.folder / shard_name(shard)
        make_shard(path, self.layout.shard_header(shard), self.layout.shard_size(shard))

    def _write_partial(self, *, ready: bool) -> None:
        known = {"format": FORMAT, "ready": ready, "identity": self.identity, "layout": self.layout.as_json()}
        write_atomically(self.folder / PARTIAL, json.dumps(sealed({**known, "head": self.head})).encode())

    def _read_records(self, progress: Progress | None) -> None:
        """Find out which rows are written: those whose bytes still match their checksum."""
        self._rows.seek(0)
        data = self._rows.read() or b""
        records, end = records_in(data, self.layout)
        self._rows.truncate(end)
        total, done = sum(count for _, count, _ in records) * self.layout.row_bytes, 0
        for first, count, checksum in records:
            self._read_record(first, count, checksum)
            done += count * self.layout.row_bytes
            if progress:
                progress(done, total)

    def _read_record(self, first: int, count: int, checksum: int) -> None:
        pieces = list(self.layout.pieces(first, count))
        if all((self.folder / shard_name(shard)).exists() for shard, *_ in pieces):
            self.present[first : first + count] = checksum_of(self.folder, self.layout, first, count) == checksum
            return
        for shard, _, before, n in pieces:
            is_there = self._elsewhere is not None and self._elsewhere.sha256(shard_name(shard)) is not None
            self.present[first + before : first + before + n] = is_there

    def has(self, first: int, count: int) -> bool:
        """Are these rows written?"""
        return bool(self.present[first : first + count].all())

    def complete_windows(self, target_offsets: Ints) -> Bools:
        """For each window of a plan's ``target_offsets``: are all its rows written?"""
        holes = np.concatenate([[0], np.cumsum(~self.present, dtype=np.int64)])
        whole: Bools = holes[target_offsets[1:]] == holes[target_offsets[:-1]]
        return whole

    def write(self, first_target: int, rows: Raw) -> None:
        """Write the states of consecutive targets, bit for bit."""
        raw, layout = RAW_DTYPES[self.layout.dtype], self.layout
        if rows.ndim != 2 or rows.shape[1] != layout.width or rows.dtype != raw:
            raise EngineError(
                f"the engine gave states of {rows.dtype} {rows.shape}, not {layout.dtype} as {raw} (n, {layout.width})",
                fix="this is a fault of the engine",
            )
        if not 0 <= first_target <= first_target + len(rows) <= layout.targets:
            raise EngineError(
                f"the engine gave states of targets {first_target} to {first_target + len(rows)} of {layout.targets}",
                fix="this is a fault of the engine",
            )
        data = bytes_of(rows)
        with disk_errors(self.folder):
            for shard, offset, before, n in layout.pieces(first_target, len(rows)):
                begin = before * layout.row_bytes
                part = data[begin : begin + n * layout.row_bytes]
                write_at(self._opened(shard), part, offset)
                self._written.add(shard)
                self._record(first_target + before, n, zlib.crc32(part))

    def _record(self, first: int, count: int, checksum: int) -> None:
        self._pending.append(packed(first, count, checksum))
        self.present[first : first + count] = True

    def _opened(self, shard: int) -> int:
        if self._shard is None or self._shard[0] != shard:
            self._close_shard()
            path = self.folder / shard_name(shard)
            if self._elsewhere is not None:
                self._elsewhere.needed(path.name)
                if not path.exists():
                    self._make(shard)
            self._shard = (shard, path.open("r+b", buffering=0))
        return self._shard[1].fileno()

    def flush(self) -> None:
        """Record what was written. The operating system already has the rows: a kill after this loses none of them."""
        records = b"".join(self._pending)
        with disk_errors(self.folder):
            end = self._rows.seek(0, os.SEEK_END)
            if self._rows.write(records) != len(records):
                self._rows.truncate(end)  # an incomplete record would hide all records after it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._pending.clear()
        self._tell_completed()

    def _tell_completed(self) -> None:
        written, self._written = self._written, set()
        for shard in sorted(written if self._elsewhere is not None else ()):
            if self.has(shard * self.layout.rows_per_shard, self.layout.shard_rows(shard)):
                assert self._elsewhere is not None
                if self._shard is not None and self._shard[0] == shard:
                    self._close_shard()  # what is written to it later asks for it again
                self._elsewhere.complete(shard_name(shard))

    def write_head(
        self,
        weight: Raw | Iterable[Raw],
        bias: Raw | None,
        *,
        scale: float,
        softcap: float | None,
        vocabulary: int,
    ) -> None:
        """Write the head: its matrix (padded vocabulary, width), whole or as blocks of rows, and its bias."""
        making = self.folder / PARTIAL_HEAD
        blocks = [weight] if isinstance(weight, np.ndarray) else weight
        try:
            with disk_errors(self.folder), making.open("wb", buffering=0) as file:
                head = self._write_blocks(file.fileno(), blocks, bias)
                head |= {"vocabulary": int(vocabulary), "scale": float(scale), "softcap": softcap and float(softcap)}
                assert head_problem(head) is None, f"an invalid head: {head_problem(head)}"
                os.fsync(file.fileno())
                os.replace(making, self.folder / HEAD)
                self.head = head
                self._write_partial(ready=True)
        finally:
            making.unlink(missing_ok=True)

    def _write_blocks(self, file: int, blocks: Iterable[Raw], bias: Raw | None) -> dict[str, Any]:
        """Write a matrix block by block, then its bias, and last the header, which has the number of rows."""
        rows, dtype, at = 0, "", DATA_START
        for block in blocks:
            dtype = dtype or _dtype_of(block)
            assert block.shape == (len(block), self.layout.width), "a head must be as wide as the states"
            assert _dtype_of(block) == dtype, "a head must have one dtype"
            write_at(file, bytes_of(block), at)
            rows, at = rows + len(block), at + block.nbytes
        assert rows, "a head without rows"
        if bias is not None:
            assert bias.shape == (rows,), "a bias must have one number per row"
            write_at(file, bytes_of(bias), at)
        bias_dtype = None if bias is None else _dtype_of(bias)
        head = {"file": HEAD, "rows": rows, "dtype": dtype, "has_bias": bias is not None, "bias_dtype": bias_dtype}
        write_at(file, memoryview(head_header(head, self.layout.width)), 0)
        return head

    def finish(self, manifest: Mapping[str, Any], progress: Progress | None = None) -> Reference:
        """Hash every file, write reference.json, and open the complete reference.

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
        assert self.head is not None, "write_head must be called before finish"
        self._close_shard()
        with disk_errors(self.folder):
            complete = self._complete(manifest, self._hashes(progress))
            assert manifest_problem(complete) is None, f"an invalid manifest: {manifest_problem(complete)}"
            write_atomically(self.folder / REFERENCE, json.dumps(complete, indent=1, allow_nan=False).encode())
            self.close()
            for name in (ROWS, PARTIAL) if self._elsewhere is None else ():
                (self.folder / name).unlink(missing_ok=True)
        if self._elsewhere is not None:
            return Reference(self.folder, complete, self.layout, read_elsewhere=self._elsewhere.read)
        return Reference.open(self.folder, verify=False)

    def _hashes(self, progress: Progress | None) -> dict[str, str]:
        """The sha256 of every file, by name."""
        names, known = [*map(shard_name, range(self.layout.shards)), HEAD], dict[str, str]()
        if self._elsewhere is not None:
            self._elsewhere.settle()
            known = {name: sha256 for name in names if (sha256 := self._elsewhere.sha256(name)) is not None}
        return known | hash_files([self.folder / name for name in names if name not in known], progress)

    def _complete(self, manifest: Mapping[str, Any], hashes: dict[str, str]) -> dict[str, Any]:
        assert self.head is not None
        names = [shard_name(shard) for shard in range(self.layout.shards)]
        complete = {
            "vocabulary": self.head["vocabulary"],
            **manifest,
            "format": FORMAT,
            **self.layout.as_json(),
            "shards": [
                {"file": name, "rows": self.layout.shard_rows(shard), "sha256": hashes[name]}
                for shard, name in enumerate(names)
            ],
            "head": {**self.head, "sha256": hashes[HEAD]},
            "identity": self.identity,
        }
        return sealed(json.loads(json.dumps(complete, allow_nan=False)))  # as it will be read: tuples are lists

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard[1].close()
            self._shard = None

    def close(self) -> None:
        """Close the files; what was flushed stays on disk."""
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
    raise EngineError(f"the engine gave a head of {rows.dtype}", fix="this is a fault of the engine")
