"""Write a reference: a baseline's final hidden states for every target, bit for bit, and its head once.

DIR/states-00000.safetensors, …   tensor "states" (rows, width) of consecutive targets, in plan order
DIR/head.safetensors              tensor "weight" (padded vocabulary, width), and "bias" if the model has one
DIR/reference.json                the manifest with the sha256 of every file; written last, so it means complete
DIR/partial.reference.json        while unfinished: the identity of the run, and the layout of the shards
DIR/partial.rows                  while unfinished: which rows are written, with a checksum per write

Rows are raw: float16 and float32 as in NumPy, bfloat16 as uint16 bit patterns.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from scoremode.errors import EngineError, InputError, RunError, harmless
from scoremode.store.files import write_atomically
from scoremode.store.reference import CHUNK, Progress, Reference, bytes_of, read_rows
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
    identity_in,
    is_own_name,
    manifest_problem,
    read_partial,
    shard_name,
)
from scoremode.store.sealed import sealed
from scoremode.values import Bools, Ints, Raw

SHARD_BYTES = 1 << 30

RECORD = struct.Struct("<QQII")  # first row, rows, crc32 of the rows, crc32 of the three before

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


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
        completed: Callable[[str], None] | None = None,
    ) -> None:
        """``completed`` is told the name of each shard whose rows are all there, after they were recorded."""
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
        self._completed, self._written = completed, set[int]()
        self._shard: tuple[int, BinaryIO] | None = None  # the last shard stays open: most often the next write is there
        with _disk_errors(self.folder):
            _require_free(self.folder)
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
            self._record(first, count, self._checksum(first, count))
        self.flush()
        with _disk_errors(self.folder):
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
            with _disk_errors(self.folder, needed):
                self._rows.truncate(0)
                self._write_partial(ready=False)
                for shard in range(self.layout.shards):
                    path = self.folder / shard_name(shard)
                    make_shard(path, self.layout.shard_header(shard), self.layout.shard_size(shard))
                self._write_partial(ready=True)
        except BaseException:
            discard(self.folder)
            raise

    def _write_partial(self, *, ready: bool) -> None:
        known = {"format": FORMAT, "ready": ready, "identity": self.identity, "layout": self.layout.as_json()}
        write_atomically(self.folder / PARTIAL, json.dumps(sealed({**known, "head": self.head})).encode())

    def _read_records(self, progress: Progress | None) -> None:
        """Find out which rows are written: those whose bytes still match their checksum."""
        self._rows.seek(0)
        data = self._rows.read() or b""
        records, at = [], 0
        while at + RECORD.size <= len(data):
            first, count, checksum, own = RECORD.unpack_from(data, at)
            if own != zlib.crc32(data[at : at + RECORD.size - 4]) or first + count > self.layout.targets:
                break  # incomplete because of a kill, so it is the last record
            records.append((first, count, checksum))
            at += RECORD.size
        self._rows.truncate(at)
        total, done = sum(count for _, count, _ in records) * self.layout.row_bytes, 0
        for first, count, checksum in records:  # a later write of the same rows overrides an earlier one
            self.present[first : first + count] = self._checksum(first, count) == checksum
            done += count * self.layout.row_bytes
            if progress:
                progress(done, total)

    def _checksum(self, first: int, count: int) -> int:
        checksum, step = 0, max(1, CHUNK // self.layout.row_bytes)
        for at in range(first, first + count, step):
            rows = read_rows(self.folder, self.layout, at, min(step, first + count - at))
            checksum = zlib.crc32(bytes_of(rows), checksum)
        return checksum

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
        with _disk_errors(self.folder):
            for shard, offset, before, n in layout.pieces(first_target, len(rows)):
                begin = before * layout.row_bytes
                _write_at(self._opened(shard), data[begin : begin + n * layout.row_bytes], offset)
                self._written.add(shard)
        self._record(first_target, len(rows), zlib.crc32(data))

    def _record(self, first: int, count: int, checksum: int) -> None:
        body = RECORD.pack(first, count, checksum, 0)[:-4]
        self._pending.append(body + struct.pack("<I", zlib.crc32(body)))
        self.present[first : first + count] = True

    def _opened(self, shard: int) -> int:
        if self._shard is None or self._shard[0] != shard:
            self._close_shard()
            self._shard = (shard, (self.folder / shard_name(shard)).open("r+b", buffering=0))
        return self._shard[1].fileno()

    def flush(self) -> None:
        """Record what was written. The operating system already has the rows: a kill after this loses none of them."""
        records = b"".join(self._pending)
        with _disk_errors(self.folder):
            end = self._rows.seek(0, os.SEEK_END)
            if self._rows.write(records) != len(records):
                self._rows.truncate(end)  # an incomplete record would hide all records after it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._pending.clear()
        self._tell_completed()

    def _tell_completed(self) -> None:
        written, self._written = self._written, set()
        for shard in sorted(written if self._completed is not None else ()):
            if self.has(shard * self.layout.rows_per_shard, self.layout.shard_rows(shard)):
                assert self._completed is not None
                self._completed(shard_name(shard))

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
            with _disk_errors(self.folder), making.open("wb", buffering=0) as file:
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
            _write_at(file, bytes_of(block), at)
            rows, at = rows + len(block), at + block.nbytes
        assert rows, "a head without rows"
        if bias is not None:
            assert bias.shape == (rows,), "a bias must have one number per row"
            _write_at(file, bytes_of(bias), at)
        bias_dtype = None if bias is None else _dtype_of(bias)
        head = {"file": HEAD, "rows": rows, "dtype": dtype, "has_bias": bias is not None, "bias_dtype": bias_dtype}
        _write_at(file, memoryview(head_header(head, self.layout.width)), 0)
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
        names = [*map(shard_name, range(self.layout.shards)), HEAD]
        with _disk_errors(self.folder):
            hashes = _hash_files([self.folder / name for name in names], progress)
            complete = self._complete(manifest, hashes)
            assert manifest_problem(complete) is None, f"an invalid manifest: {manifest_problem(complete)}"
            write_atomically(self.folder / REFERENCE, json.dumps(complete, indent=1, allow_nan=False).encode())
            self.close()
            for name in (ROWS, PARTIAL):
                (self.folder / name).unlink(missing_ok=True)
        return Reference.open(self.folder, verify=False)

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


def is_reference(folder: Path) -> bool:
    """Does the folder contain a reference, finished or not, with a readable identity?"""
    return identity_in(folder) is not None


def discard(folder: Path) -> None:
    """Remove a reference's own files, finished or not; does nothing if there is none. The caller holds the lock.

    First, partial.reference.json is replaced by one that says that no rows are written; it is removed last. So after a
    kill the remaining files are still known to be ours, and the next writer starts from the beginning.
    """
    if not any((folder / name).exists() for name in (REFERENCE, PARTIAL, ROWS)):
        return
    nothing = {"format": FORMAT, "ready": False, "identity": identity_in(folder) or {}, "layout": {}}
    with suppress(OSError):  # a full disk must not prevent the removal
        write_atomically(folder / PARTIAL, json.dumps(sealed(nothing)).encode())
    for name in (REFERENCE, ROWS):
        (folder / name).unlink(missing_ok=True)
    for path in sorted(folder.iterdir(), key=lambda p: p.name == PARTIAL):
        if is_own_name(path.name):
            path.unlink(missing_ok=True)


def discard_others(folder: Path, identity: Mapping[str, Any]) -> None:
    """Remove the reference of another run, which a killed process left while it replaced that run."""
    if identity_in(folder) != identity:
        discard(folder)


def _require_free(folder: Path) -> None:
    """Refuse a path that is a file, and a folder with files that have our names but are not ours."""
    if not folder.is_dir():
        if folder.exists():
            raise RunError(f"{folder} is a file", fix="give a folder to --out")
        return
    foreign = sorted(p.name for p in folder.iterdir() if p.name == HEAD or SHARD_NAME.fullmatch(p.name))
    if foreign and not any((folder / name).exists() for name in (REFERENCE, PARTIAL)):
        raise RunError(
            f"{folder} is not a reference: it contains {foreign[0]}", fix="give a new or empty folder to --out"
        )


def make_shard(path: Path, header: bytes, size: int) -> None:
    """Create a file of this size with all its space allocated, so that a later write cannot find the disk full."""
    with path.open("wb", buffering=0) as file:
        _write_at(file.fileno(), memoryview(header), 0)
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # not supported everywhere; a full disk is then detected later
            if isinstance(error, OSError) and error.errno not in NO_PREALLOCATION:
                raise
            file.truncate(size)
        os.fsync(file.fileno())


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``. Not mapped: with a mapping, a full disk would kill the process instead of raising."""
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at : at + (1 << 30)], offset + at)


def _dtype_of(rows: Raw) -> str:
    for name, raw in RAW_DTYPES.items():
        if rows.dtype == raw:
            return name
    raise EngineError(f"the engine gave a head of {rows.dtype}", fix="this is a fault of the engine")


def _hash_files(paths: list[Path], progress: Progress | None) -> dict[str, str]:
    """The sha256 of each file, by name; each file is flushed to disk before it is hashed."""
    total, done, hashes = sum(path.stat().st_size for path in paths), 0, {}
    for path in paths:
        hasher = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            while chunk := file.read(CHUNK):
                hasher.update(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
        hashes[path.name] = hasher.hexdigest()
    return hashes


@contextmanager
def _disk_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn OSError into RunError with a message of one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise RunError(
                f"{folder} cannot be written ({error.strerror or error})", fix="give another --out"
            ) from None
        sizes = ""
        with suppress(OSError):
            free = f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free"
            sizes = f" ({free})" if needed is None else f" (the states take {needed / 1e9:.2f} GB, {free})"
        fix = "free some space and run the same command again to resume, or give another --out"
        raise RunError(f"the disk of {folder} is full{sizes}", fix=fix) from None
