"""Heads of baselines that are sent to a scoring service: one message each, kept under the digest of its bytes."""

from __future__ import annotations

import hashlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scoremode.engines.base import StoredHead
from scoremode.engines.messages import StatesDtype
from scoremode.errors import InputError
from scoremode.scores.packing import MOST_HEADER, START, Header, Layout, Parts, pack, read_layout
from scoremode.store.reference_format import RAW_DTYPES
from scoremode.values import Raw

FOLDER = "SCOREMODE_SERVICE_FOLDER"  # where a service keeps what clients send; its workers read it there
DIGEST = re.compile(r"[0-9a-f]{64}")
WIDEST = 1 << 20


class HeadHeader(Header, kw_only=True, tag="head"):
    """What a message with a head says of it."""

    vocabulary: int
    dtype: StatesDtype
    bias_dtype: StatesDtype
    scale: float
    softcap: float | None = None


def head_parts(head: StoredHead) -> Parts:
    """A head as a message."""
    header = HeadHeader(
        vocabulary=head.vocabulary,
        dtype=head.dtype,  # type: ignore[arg-type]
        bias_dtype=head.bias_dtype,  # type: ignore[arg-type]
        scale=head.scale,
        softcap=head.softcap,
    )
    arrays = {"weight": np.ascontiguousarray(head.weight[: head.vocabulary])}
    if head.bias is not None:
        arrays["bias"] = np.ascontiguousarray(head.bias[: head.vocabulary])
    return pack(header, arrays)


def digest_of(parts: Parts) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def heads_folder() -> Path:
    """The folder of this service, in its front end and its workers alike."""
    found = os.environ.get(FOLDER)
    if not found:
        raise OSError(f"{FOLDER} is not set")
    return Path(found)


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head that was sent, checked, and read only where it is needed."""

    path: Path
    layout: Layout[HeadHeader]
    width: int

    @staticmethod
    def open(path: Path) -> HeadFile:
        """The head in a file; InputError if the file is anything else."""
        with path.open("rb") as file:
            start = file.read(START.size + MOST_HEADER)
        layout = read_layout(start, HeadHeader)
        if path.stat().st_size != layout.size:
            raise InputError(f"a head of {layout.size} bytes came with {path.stat().st_size}", fix="send it again")
        header, weight, bias = layout.header, layout.places.get("weight"), layout.places.get("bias")
        if weight is None:
            raise InputError("a head has no matrix", fix="send weight, dtype and bias_dtype")
        rows, width = weight.shape if len(weight.shape) == 2 else (0, 0)
        good = weight.dtype == RAW_DTYPES[header.dtype] and 0 < rows == header.vocabulary and 0 < width <= WIDEST
        good = good and (bias is None or (bias.dtype == RAW_DTYPES[header.bias_dtype] and bias.shape == (rows,)))
        if not good or not math.isfinite(header.scale) or not math.isfinite(header.softcap or 0.0):
            raise InputError("the matrix, bias, scale or cap of a head is described wrongly", fix="send it again")
        return HeadFile(path, layout, width)

    @property
    def header(self) -> HeadHeader:
        return self.layout.header

    @property
    def vocabulary(self) -> int:
        return self.header.vocabulary

    def weight(self, first: int, count: int) -> Raw:
        """Rows of the matrix (count, width)."""
        return self._read("weight", first, count, self.width).reshape(-1, self.width)

    def bias(self, first: int, count: int) -> Raw | None:
        return self._read("bias", first, count, 1) if "bias" in self.layout.places else None

    def _read(self, name: str, first: int, count: int, per_row: int) -> Raw:
        place = self.layout.places[name]
        if first < 0 or first + count > self.vocabulary:
            raise ValueError(f"ids {first} to {first + count} of a head of {self.vocabulary}")
        at = place.offset + first * per_row * place.dtype.itemsize
        found: Raw = np.fromfile(self.path, place.dtype, count * per_row, offset=at)
        if len(found) != count * per_row:
            raise ValueError("a head was cut")
        return found
