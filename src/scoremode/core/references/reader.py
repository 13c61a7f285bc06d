"""Read a reference: a baseline's final hidden states for every target, bit for bit, and its head."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scoremode.core.cache.entries import hold_entry
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.disk.folders import HEAD, shard_name
from scoremode.core.disk.stores import store_of
from scoremode.core.disk.uri import RemotePath, stored_at
from scoremode.core.reading import open_regular
from scoremode.core.references.format import (
    DATA_START,
    RAW_DTYPES,
    HeadManifest,
    ReferenceManifest,
    ShardLayout,
    read_reference_manifest,
    remake_fix,
)
from scoremode.errors import RunError
from scoremode.values import Raw

CHUNK = 1 << 20  # bytes that are read together


@dataclass(frozen=True, eq=False)
class Reference:
    """A finished reference. Rows are read on demand, never all at once."""

    folder: Path
    manifest: ReferenceManifest
    place: RemotePath | None = None  # the URI of the original, if the folder is a copy

    @staticmethod
    def open(folder: str | Path, *, verify: bool = True, place: RemotePath | None = None) -> Reference:
        """The reference in this folder, which may be a copy of the one at ``place``.

        Sizes and headers are always checked; hashes only if a file has changed, and not without ``verify``.
        """
        folder = Path(folder)
        manifest = read_reference_manifest(folder)
        expected = [(s.file, s.sha256, manifest.shard_file(number)) for number, s in enumerate(manifest.shards)]
        expected.append((HEAD, manifest.head.sha256, manifest.head.as_file(manifest.width)))
        for name, sha256, form in expected:
            problem = form.problem(folder / name)
            if problem is None and verify and remembered_sha256(folder / name) != sha256:
                problem = "was changed after the reference was made"
            _require_sound(folder, name, problem)
        hold_entry(folder)  # its files are opened later, when rows are read
        return Reference(folder, manifest, place)

    @property
    def targets(self) -> int:
        return self.manifest.targets

    @property
    def width(self) -> int:
        return self.manifest.width

    @property
    def dtype(self) -> str:
        return self.manifest.dtype

    @property
    def vocabulary(self) -> int:
        """Number of ids that get a probability; the head's rows after them are padding."""
        return self.manifest.vocabulary

    @property
    def head(self) -> HeadManifest:
        return self.manifest.head

    def rows(self, first: int, count: int, into: Raw | None = None) -> Raw:
        """The raw states (count, width) of consecutive targets, as a new array or in the one given."""
        if first < 0 or count < 0 or first + count > self.targets:
            raise IndexError(f"rows {first} to {first + count} of a reference of {self.targets}")
        return read_rows(self.folder, self.manifest, first, count, into=into)

    def head_weight(self) -> Raw:
        """The head's raw matrix (padded vocabulary, width), mapped, so that only the parts in use are read.

        Changes stay in memory and never reach the file (torch warns about read-only arrays).
        """
        shape = (self.head.rows, self.width)
        return np.memmap(open_regular(self.folder / HEAD), RAW_DTYPES[self.head.dtype], "c", DATA_START, shape)

    def head_bias(self) -> Raw | None:
        """The head's raw bias (padded vocabulary,); None if the model has none."""
        head = self.head
        if head.bias_dtype is None:
            return None
        at = DATA_START + head.rows * self.width * RAW_DTYPES[head.dtype].itemsize
        with open_regular(self.folder / HEAD) as file:
            return np.fromfile(file, RAW_DTYPES[head.bias_dtype], head.rows, offset=at)


def open_reference(location: str | os.PathLike[str] | RemotePath) -> Reference:
    """The reference in a folder, or a copy of the one behind a URI, checked."""
    where = stored_at(location)
    if not isinstance(where, RemotePath):
        return Reference.open(where)
    return Reference.open(store_of(where).copy_of_run(where, states=True), place=where)


def _require_sound(folder: Path, name: str, problem: str | None) -> None:
    if problem is not None:
        raise RunError(f"{folder / name} {problem}", fix=remake_fix(folder))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def bytes_of(rows: Raw) -> memoryview:
    """The memory of an array as bytes; copied only if the array is not contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def read_rows(folder: Path, layout: ShardLayout, first: int, count: int, *, into: Raw | None = None) -> Raw:
    """Rows as a new array, or in the one given. Not mapped: if a mapped file were truncated, this process would die."""
    rows = np.empty((count, layout.width), RAW_DTYPES[layout.dtype]) if into is None else into
    for shard, offset, before, n in layout.pieces(first, count):
        path, rest = folder / shard_name(shard), bytes_of(rows[before : before + n])
        try:
            with open_regular(path) as file:
                file.seek(offset)
                while rest and (got := file.readinto(rest)):
                    rest = rest[got:]
        except OSError as error:
            _require_sound(folder, path.name, f"cannot be read ({error.strerror})")
        _require_sound(folder, path.name, "was truncated" if rest else None)
    return rows


def rows_checksum(folder: Path, layout: ShardLayout, first: int, count: int) -> int:
    """The crc32 of rows on disk, read a few at a time."""
    checksum, step = 0, max(1, CHUNK // layout.row_bytes)
    for at in range(first, first + count, step):
        rows = read_rows(folder, layout, at, min(step, first + count - at))
        checksum = zlib.crc32(bytes_of(rows), checksum)
    return checksum
