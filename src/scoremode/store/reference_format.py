"""The file format of a reference: the position of each row, the manifest, and checks of both.

Files are not trusted: types, ranges, sizes and file names are checked.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.errors import RunError, harmless
from scoremode.store.sealed import (
    Kind,
    each,
    flag,
    is_sealed,
    line,
    mapping,
    number,
    one_of,
    optional,
    record,
    sha256,
    text,
    unusable_field,
    whole,
)
from scoremode.text.json_files import read_object

FORMAT = 2
REFERENCE, HEAD, PARTIAL, ROWS = "reference.json", "head.safetensors", "partial.reference.json", "partial.rows"
PARTIAL_HEAD = ".head.safetensors.partial"
SHARD_NAME = re.compile(r"states-\d{5,}\.safetensors")

RAW_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
DATA_START = 512
"""Every file's header is padded to this offset: rows are aligned, and a header can be written after its rows."""
MOST_ROWS, WIDEST = 1 << 48, 1 << 24


# ── geometry ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Which row is stored in which file, and where."""

    targets: int
    width: int
    dtype: str
    rows_per_shard: int

    @property
    def row_bytes(self) -> int:
        return self.width * RAW_DTYPES[self.dtype].itemsize

    @property
    def shards(self) -> int:
        return -(-self.targets // self.rows_per_shard)

    def shard_rows(self, shard: int) -> int:
        return min(self.rows_per_shard, self.targets - shard * self.rows_per_shard)

    def shard_size(self, shard: int) -> int:
        return DATA_START + self.shard_rows(shard) * self.row_bytes

    def shard_header(self, shard: int) -> bytes:
        return _header([("states", self.dtype, (self.shard_rows(shard), self.width))])

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """The parts of a range of rows: (shard, byte offset in its file, rows before this part, rows of this part)."""
        before = 0
        while before < count:
            shard, row = divmod(first + before, self.rows_per_shard)
            rows = min(count - before, self.rows_per_shard - row)
            yield shard, DATA_START + row * self.row_bytes, before, rows
            before += rows

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("targets", "width", "dtype", "rows_per_shard")}


def shard_name(shard: int) -> str:
    return f"states-{shard:05d}.safetensors"


def is_own_name(name: str) -> bool:
    """Is this the name of a file that a reference adds to a run folder?"""
    return name in {REFERENCE, HEAD, PARTIAL, ROWS, PARTIAL_HEAD} or SHARD_NAME.fullmatch(name) is not None


def _header(tensors: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The safetensors header of consecutive tensors (name, dtype, shape), padded with spaces."""
    described, at = {}, 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * RAW_DTYPES[dtype].itemsize
        described[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    written = json.dumps(described, separators=(",", ":")).encode()
    assert len(written) <= DATA_START - 8, "a header that is too long"
    return struct.pack("<Q", DATA_START - 8) + written.ljust(DATA_START - 8)


def head_header(head: Mapping[str, Any], width: int) -> bytes:
    bias = [("bias", head["bias_dtype"], (head["rows"],))] if head["has_bias"] else []
    return _header([("weight", head["dtype"], (head["rows"], width)), *bias])


def head_size(head: Mapping[str, Any], width: int) -> int:
    size = DATA_START + int(head["rows"]) * width * RAW_DTYPES[head["dtype"]].itemsize
    return size + (head["rows"] * RAW_DTYPES[head["bias_dtype"]].itemsize if head["has_bias"] else 0)


# ── manifests ────────────────────────────────────────────────────────────────────────────────────────────────────────
dtype = one_of(*RAW_DTYPES)
factor = number(least=1e-300, most=1e30)  # a value outside means a damaged file
HEAD_FIELDS: dict[str, Kind] = {
    "file": one_of(HEAD),
    "rows": whole(1, 1 << 32),
    "vocabulary": whole(1, 1 << 32),
    "dtype": dtype,
    "has_bias": flag,
    "bias_dtype": optional(dtype),
    "scale": factor,
    "softcap": optional(factor),
}
LAYOUT_FIELDS: dict[str, Kind] = {
    "targets": whole(0, MOST_ROWS),
    "width": whole(1, WIDEST),
    "rows_per_shard": whole(1, MOST_ROWS),
    "dtype": dtype,
}
FIELDS: dict[str, Kind] = {
    **LAYOUT_FIELDS,
    "format": whole(FORMAT, FORMAT),
    "plan_digest": text,
    "method": text,
    "model_fingerprint": text,
    "tokenizer": text,
    "engine": mapping(),
    "identity": mapping(),
    "vocabulary": whole(1, 1 << 32),
    "shards": each(record({"file": text, "rows": whole(1, MOST_ROWS), "sha256": sha256})),
    "head": record({**HEAD_FIELDS, "sha256": sha256}),
}
MORE: dict[str, Kind] = {"method_settings": mapping(), "corpus": line, "corpus_sha256": text}
PARTIAL_FIELDS: dict[str, Kind] = {
    "format": whole(FORMAT, FORMAT),
    "ready": flag,
    "identity": mapping(),
    "layout": mapping(),
}


def remake_fix(folder: Path) -> str:
    """How to fix a damaged reference, for an error message."""
    made = f"scoremode reference MODEL --corpus … --out {shlex.quote(str(folder))}"
    return f"copy the folder again, or remove it and make it again: {made}"


def read_reference_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest of a finished reference; RunError if it is missing, changed or invalid."""
    path = folder / REFERENCE
    if not path.exists():
        if (folder / PARTIAL).exists():
            raise RunError(f"{folder} contains an unfinished reference", fix="run the same command again to resume")
        made = f"scoremode reference MODEL --corpus … --out {shlex.quote(str(folder))}"
        raise RunError(f"{folder} is not a reference", fix=f"make one: {made}")
    try:
        manifest = read_object(path)
    except ValueError as error:
        raise RunError(f"{path} is damaged ({harmless(str(error))})", fix=remake_fix(folder)) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror})", fix=remake_fix(folder)) from None
    known = manifest.get("format")
    if type(known) is int and known != FORMAT:
        raise RunError(
            f"{folder} was written in format {known}, this scoremode reads {FORMAT}", fix="make the reference again"
        )
    if not is_sealed(manifest):
        raise RunError(f"{path} was changed after the reference was made", fix=remake_fix(folder))
    wrong = manifest_problem(manifest)
    if wrong is not None:
        raise RunError(f"{path} is damaged ({harmless(wrong)})", fix=remake_fix(folder))
    return manifest


def manifest_problem(manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with a reference's manifest, in words; None if every field has the right type and range."""
    unfit = unusable_field(manifest, FIELDS, MORE)
    if unfit is not None:
        return f"no usable {unfit}"
    layout = ShardLayout(manifest["targets"], manifest["width"], manifest["dtype"], manifest["rows_per_shard"])
    if len(manifest["shards"]) != layout.shards:
        return "its list of files does not cover the targets"
    for shard, entry in enumerate(manifest["shards"]):
        # file names are fixed, so that a manifest cannot refer to files outside its folder
        if entry["file"] != shard_name(shard) or entry["rows"] != layout.shard_rows(shard):
            return f"file {shard} is not {shard_name(shard)} with {layout.shard_rows(shard)} rows"
    if manifest["vocabulary"] > manifest["head"]["vocabulary"]:
        return "no usable vocabulary"
    return head_problem(manifest["head"])


def head_problem(head: Any) -> str | None:
    """What is wrong with a head's description, in words; None if it is consistent."""
    if not record(HEAD_FIELDS)(head):
        return "no usable head"
    if head["vocabulary"] > head["rows"]:
        return "its head has fewer rows than ids"
    if head["has_bias"] != (head["bias_dtype"] is not None):
        return "has_bias and bias_dtype disagree"
    return None


def read_partial(folder: Path) -> dict[str, Any] | None:
    """The notes of an unfinished reference; None if there is none."""
    path = folder / PARTIAL
    if not path.exists():
        return None
    try:
        known = read_object(path)
        reason = unusable_field(known, PARTIAL_FIELDS)
        reason = f"no usable {reason}" if reason else None if is_sealed(known) else "it was changed"
    except (ValueError, OSError) as error:
        reason = str(error)
    if reason:
        raise RunError(f"{path} is damaged ({harmless(reason)})", fix="start again with --fresh")
    return known


def identity_in(folder: Path) -> dict[str, Any] | None:
    """The identity of the reference in a folder, even if it is unfinished or damaged; None if it cannot be read."""
    for name in (REFERENCE, PARTIAL):
        with suppress(ValueError, OSError):
            identity = read_object(folder / name).get("identity")
            if isinstance(identity, dict):
                return identity
    return None


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def file_problem(path: Path, size: int, header: bytes) -> str | None:
    """What is wrong with a file, in words, judged by its size and header; None if nothing is."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "is not a file"
        if found.st_size != size:
            how = "was truncated" if found.st_size < size else "is too long"
            return f"{how} ({found.st_size} bytes instead of {size})"
        with path.open("rb") as file:
            return None if file.read(DATA_START) == header else "does not have the expected header"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def head_fits(folder: Path, head: Any, width: int) -> bool:
    """Was the head of an unfinished reference written completely?"""
    if head_problem(head) is not None:
        return False
    return file_problem(folder / HEAD, head_size(head, width), head_header(head, width)) is None
