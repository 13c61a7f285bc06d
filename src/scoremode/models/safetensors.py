"""What the headers of safetensors files say: bytes, and bits a weight. Weights stay unread.

A header is taken as if a stranger had written it. Where a format is not understood, bits a weight are not known:
a number that is silently wrong would be drawn into a chart.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoremode.errors import ModelError

LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library too
FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
INTEGER_BITS = {"I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}
DTYPE_BITS = FLOAT_BITS | INTEGER_BITS

PACKED = ("weight_packed", "qweight")  # several weights in one integer: compressed-tensors; GPTQ and AWQ
BESIDE_WEIGHTS = {  # what a quantized layer keeps beside its weight
    *("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "weight_scale_inv"),
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point", "scales", "qzeros", "g_idx"),
}
BUFFERS = {"position_ids", "token_type_ids", "num_batches_tracked", "bias", "masked_bias"}  # as integers: no weights
LONGEST_SHAPE = 8  # numbers in a weight_shape


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file holds; an error where it is damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        raw = file.read(length) if length < min(size, LONGEST_HEADER) else b""
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        tensors = {name: _entry(path, entry, 8 + length) for name, entry in entries.items()}
        _require_no_overlap(tensors.values(), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path} is not a safetensors file", fix="download it again") from None
    end = 8 + length + stored_bytes(tensors.values())
    if end > size:
        raise ModelError(f"{path} is cut short: {size} bytes of {end}", fix="download it again")
    return tensors


def _entry(path: Path, entry: Mapping[str, Any], data: int) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = (*shape, begin, end)  # bounded, so that no product of them takes long
    if not isinstance(dtype, str) or len(shape) > 32 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError("not a tensor")
    tensor = StoredTensor(path, dtype, tuple(shape), data + begin, data + end)
    bits = DTYPE_BITS.get(dtype)
    if end < begin or (bits is not None and 8 * (end - begin) != tensor.size * bits):
        raise ValueError("offsets and shape do not fit")
    return tensor


def _require_no_overlap(tensors: Iterable[StoredTensor], data: int) -> None:
    """One behind the other, without gaps, as the format demands: so no byte is counted twice."""
    expected = data
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != expected:
            raise ValueError("tensors overlap, or leave a gap")
        expected = tensor.end


def stored_bytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.end - tensor.begin for tensor in tensors)


def bits_per_weight(tensors: Mapping[str, StoredTensor], quantization: object = None) -> float | None:
    """Stored bits over weights; scales and zero points are bits too, but no weights. None where that is not known.

    ``quantization`` is the config's ``quantization_config``. A weight that is stored twice counts twice.
    """
    counts = [_weights_in(name, tensors, quantization) for name in tensors]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or not sum(known):
        return None
    return 8 * stored_bytes(tensors.values()) / sum(known)


def _weights_in(name: str, tensors: Mapping[str, StoredTensor], quantization: object) -> int | None:
    """How many weights a tensor stands for; None where its format is not understood."""
    tensor, (prefix, _, leaf) = tensors[name], name.rpartition(".")
    if leaf in PACKED:
        return _packed_weights(tensor, tensors.get(f"{prefix}.weight_shape"), _packed_bits(quantization))
    if isinstance(quantization, dict) and leaf in BESIDE_WEIGHTS:
        return 0
    if tensor.dtype in FLOAT_BITS or (tensor.dtype == "I8" and f"{prefix}.weight_scale" in tensors):
        return tensor.size
    return 0 if tensor.dtype == "BOOL" or leaf in BUFFERS else None


def _packed_weights(packed: StoredTensor, shape: StoredTensor | None, bits: int | None) -> int | None:
    room = 8 * (packed.end - packed.begin)
    written = None if shape is None else _read_shape(shape)
    if written is None:  # formats whose packing leaves no gaps
        return None if bits is None else room // bits
    return written if written * (bits or 1) <= room else None


def _read_shape(tensor: StoredTensor) -> int | None:
    """How many weights a ``weight_shape`` says; its few numbers are the only data that is read."""
    if tensor.dtype != "I64" or not 0 < tensor.size <= LONGEST_SHAPE:
        return None
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        numbers = struct.unpack(f"<{tensor.size}q", file.read(8 * tensor.size))
    return math.prod(numbers) if min(numbers) > 0 else None


def _packed_bits(quantization: object) -> int | None:
    """Bits of a packed weight where the config names exactly one number."""
    if not isinstance(quantization, dict):
        return None
    groups = quantization.get("config_groups")
    found: Sequence[object] = [quantization.get("bits")]  # GPTQ and AWQ
    if isinstance(groups, dict):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        found = [w.get("num_bits") for w in weights if isinstance(w, dict)]
    bits = [b for b in found if type(b) is int and 0 < b <= 16]
    return bits[0] if bits and bits == [bits[0]] * len(found) else None
