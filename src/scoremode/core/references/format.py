"""The file format of a reference: the position of each row, the manifests, and checks of both.

Files are not trusted: types, ranges, sizes and file names are checked.
"""

from __future__ import annotations

import json
import math
import shlex
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from scoremode.core.disk.folders import HEAD, REFERENCE, ROWS, is_reference_file, shard_name
from scoremode.core.disk.manifests import Sha256, Text, is_manifest, read_sealed
from scoremode.core.disk.records import identity_in, is_record_file
from scoremode.core.reading import open_regular
from scoremode.core.strict_json import parse, read_object
from scoremode.errors import RunError

FORMAT = 2
ROWS_HEADER = {"for": "reference"}  # the first line of partial.rows, which has the identity and the layout besides
RAW_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
DATA_START = 512
"""Every file's header is padded to this offset, so that rows are aligned and a header can be written after its rows."""
MOST_ROWS, WIDEST = 1 << 48, 1 << 24


# ── geometry ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class TensorFile(NamedTuple):
    """The size and the header that a safetensors file must have."""

    size: int
    header: bytes

    @staticmethod
    def of(*tensors: tuple[str, str, tuple[int, ...]]) -> TensorFile:
        """Describes the file of consecutive tensors (name, dtype, shape); its header is padded with spaces."""
        described, at = {}, 0
        for name, dtype, shape in tensors:
            end = at + math.prod(shape) * RAW_DTYPES[dtype].itemsize
            described[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        written = json.dumps(described, separators=(",", ":")).encode()
        assert len(written) <= DATA_START - 8, "a header that is too long"
        return TensorFile(DATA_START + at, struct.pack("<Q", DATA_START - 8) + written.ljust(DATA_START - 8))

    def problem(self, path: Path) -> str | None:
        """Says how a file differs from this description; None if its size and header are right."""
        if not path.is_file():
            return "is missing"
        try:
            size = path.stat().st_size
            if size != self.size:
                return f"has {size} bytes instead of {self.size}"
            with open_regular(path) as file:
                return None if file.read(DATA_START) == self.header else "does not have the expected header"
        except OSError as error:
            return f"cannot be read ({error.strerror})"


Dtype = Literal["bfloat16", "float16", "float32", "float64"]
Factor = Annotated[float, Meta(ge=1e-300, le=1e30)]  # a value outside these bounds means a damaged file
Rows = Annotated[int, Meta(ge=1, le=MOST_ROWS)]
Ids = Annotated[int, Meta(ge=1, le=1 << 32)]


class ShardLayout(msgspec.Struct, frozen=True):
    """The file and the position of every row."""

    targets: Annotated[int, Meta(ge=0, le=MOST_ROWS)]
    width: Annotated[int, Meta(ge=1, le=WIDEST)]
    dtype: Dtype
    rows_per_shard: Rows

    @property
    def row_bytes(self) -> int:
        return self.width * RAW_DTYPES[self.dtype].itemsize

    @property
    def shard_count(self) -> int:
        return -(-self.targets // self.rows_per_shard)

    def shard_range(self, shard: int) -> tuple[int, int]:
        """Returns the first row of a shard, and the number of its rows."""
        first = shard * self.rows_per_shard
        return first, min(self.rows_per_shard, self.targets - first)

    def shard_file(self, shard: int) -> TensorFile:
        return TensorFile.of(("states", self.dtype, (self.shard_range(shard)[1], self.width)))

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields the parts of a range of rows: (shard, byte offset in its file, rows before the part, its rows)."""
        before = 0
        while before < count:
            shard, row = divmod(first + before, self.rows_per_shard)
            rows = min(count - before, self.rows_per_shard - row)
            yield shard, DATA_START + row * self.row_bytes, before, rows
            before += rows


def estimate_bytes(targets: int, width: int, dtype: str, vocabulary: int) -> dict[str, int]:
    """Returns the size of a reference on disk, and the size of float16 logits for comparison."""
    item = RAW_DTYPES[dtype].itemsize
    states, head = targets * width * item, vocabulary * width * item
    return {"states": states, "head": head, "total": states + head, "logits_fp16": targets * vocabulary * 2}


# ── manifests ────────────────────────────────────────────────────────────────────────────────────────────────────────
class HeadManifest(msgspec.Struct):
    file: Literal["head.safetensors"]
    rows: Ids
    vocabulary: Ids
    dtype: Dtype
    has_bias: bool
    bias_dtype: Dtype | None
    scale: Factor
    softcap: Factor | None
    sha256: Sha256

    def as_file(self, width: int) -> TensorFile:
        bias = [("bias", self.bias_dtype, (self.rows,))] if self.bias_dtype else []
        return TensorFile.of(("weight", self.dtype, (self.rows, width)), *bias)


class ShardManifest(msgspec.Struct):
    file: Text
    rows: Rows
    sha256: Sha256


class ReferenceManifest(ShardLayout, frozen=True):
    """The fields of a finished reference's manifest; fields with a default are in some manifests only."""

    format: Literal[2]
    plan_digest: Text
    method: Text
    model_fingerprint: Text
    tokenizer: Text
    engine: dict[str, object]
    identity: dict[str, object]
    vocabulary: Ids
    shards: list[ShardManifest]
    head: HeadManifest
    method_settings: dict[str, object] = {}
    corpus: str = ""
    corpus_sha256: Text = ""


def remake_fix(folder: Path) -> str:
    """Returns advice for the error message about a damaged reference."""
    return f"copy the folder again, or remove it and make it again: {_command(folder)}"


def _command(folder: Path) -> str:
    return f"scoremode reference MODEL --corpus … --out {shlex.quote(str(folder))}"


def read_reference_manifest(folder: Path) -> ReferenceManifest:
    """Returns the checked manifest of a finished reference; RunError if it cannot be used."""
    path, remake = folder / REFERENCE, remake_fix(folder)
    if not path.exists():
        if (folder / ROWS).exists():
            raise RunError(f"{folder} contains an unfinished reference", fix="run the same command again to resume")
        raise RunError(f"{folder} is not a reference", fix=f"make one: {_command(folder)}")
    fields = read_sealed(path, ReferenceManifest, format=FORMAT, fix=remake)
    manifest = msgspec.convert(fields, ReferenceManifest)
    # file names are fixed, so that a manifest cannot refer to files outside its folder
    if [shard.file for shard in manifest.shards] != list(map(shard_name, range(manifest.shard_count))):
        raise RunError(f"{path} is damaged (its list of files)", fix=remake)
    return manifest


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────
def is_reference(folder: Path) -> bool:
    """Does the folder contain a reference, finished or not, with a readable identity?"""
    with suppress(ValueError, OSError):
        if isinstance(read_object(folder / REFERENCE).get("identity"), dict):
            return True
    return identity_in(folder / ROWS) is not None


def is_part(path: Path) -> bool:
    """Is this a file of a reference, by its name and by its content?"""
    if path.name == REFERENCE:
        return is_manifest(path, ReferenceManifest)
    if path.name == ROWS:
        return is_record_file(path, ROWS_HEADER)
    try:
        with open_regular(path) as file:
            start = file.read(DATA_START)
        if not start.strip(b"\0"):
            return True  # after a power cut, a file may be zeros
        size, header = struct.unpack("<Q", start[:8])[0], parse(start[8:])
    except (OSError, ValueError, struct.error):
        return False
    names = {"weight", "bias"} if path.name == HEAD else {"states"}
    return size == DATA_START - 8 and isinstance(header, dict) and bool(header) and header.keys() <= names


def discard(folder: Path) -> None:
    """Removes a reference's own files, finished or not. The caller holds the lock, and its journal is in the folder."""
    for path in folder.iterdir():
        if is_reference_file(path.name) and (not path.stat().st_size or is_part(path)):
            path.unlink(missing_ok=True)
