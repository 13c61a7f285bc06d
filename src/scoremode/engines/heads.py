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
from scoremode.engines.messages import MOST_HEADER, START, Layout, Parts, pack, read_layout
from scoremode.errors import InputError
from scoremode.store.reference_format import RAW_DTYPES
from scoremode.values import Raw

FOLDER = "SCOREMODE_SERVICE_FOLDER"  # where a service keeps what clients send; its workers read it there
DIGEST = re.compile(r"[0-9a-f]{64}")
WIDEST = 1 << 20


def head_parts(head: StoredHead) -> Parts:
    """A head as a message."""
    fields = {
        "vocabulary": head.vocabulary,
        "dtype": head.dtype,
        "bias_dtype": head.bias_dtype,
        "scale": head.scale,
        "softcap": head.softcap,
    }
    arrays = {"weight": np.ascontiguousarray(head.weight[: head.vocabulary])}
    if head.bias is not None:
        arrays["bias"] = np.ascontiguousarray(head.bias[: head.vocabulary])
    return pack("head", fields, arrays)


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
    layout: Layout
    dtype: str
    bias_dtype: str
    scale: float
    softcap: float | None
    vocabulary: int
    width: int

    @staticmethod
    def open(path: Path) -> HeadFile:
        """The head in a file; InputError if the file is anything else."""
        with path.open("rb") as file:
            start = file.read(START.size + MOST_HEADER)
        layout = read_layout(start, "head")
        if path.stat().st_size != layout.size:
            raise InputError(f"a head of {layout.size} bytes came with {path.stat().st_size}", fix="send it again")
        fields, weight, bias = layout.fields, layout.places.get("weight"), layout.places.get("bias")
        dtype, bias_dtype = fields.get("dtype"), fields.get("bias_dtype")
        named = isinstance(dtype, str) and isinstance(bias_dtype, str)
        if not named or dtype not in RAW_DTYPES or bias_dtype not in RAW_DTYPES or weight is None:
            raise InputError("a head has no matrix of a known dtype", fix="send weight, dtype and bias_dtype")
        rows, width = weight.shape if len(weight.shape) == 2 else (0, 0)
        good = weight.dtype == RAW_DTYPES[dtype] and rows > 0 and 0 < width <= WIDEST
        good = good and (bias is None or (bias.dtype == RAW_DTYPES[bias_dtype] and bias.shape == (rows,)))
        scale, softcap = _number(fields.get("scale")), _number(fields.get("softcap"))
        if not good or rows != fields.get("vocabulary") or scale is None or (fields.get("softcap") and not softcap):
            raise InputError("the matrix, bias, scale or cap of a head is described wrongly", fix="send it again")
        return HeadFile(path, layout, dtype, bias_dtype, scale, softcap, rows, width)

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


def _number(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number larger than any float
        return None
