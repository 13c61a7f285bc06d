"""Reads the headers of safetensors files: tensors, bytes, and bits per weight. Weights are not read.

If a format is not understood, bits per weight are None, because a wrong number could appear in a chart unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scoremode.core.models.sizes import ModelSizes, add_up
from scoremode.core.reading import LARGEST, open_regular
from scoremode.errors import ModelError

FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
INTEGER_BITS = {"I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}
DTYPE_BITS = FLOAT_BITS | INTEGER_BITS | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}

PACKED = ("weight_packed", "qweight")  # several weights in one integer: compressed-tensors; GPTQ and AWQ
TRELLIS = "trellis"  # weights of EXL3
BESIDE_WEIGHTS = {  # tensors of a quantized layer that are not weights
    *("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "weight_scale_inv"),
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *("suh", "svh", "su", "sv", "mcg", "mul1"),  # EXL3
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point", "scales", "qzeros", "g_idx"),
    *("biases", "global_scale"),  # MLX
}
BUFFERS = {"position_ids", "token_type_ids", "num_batches_tracked", "bias", "masked_bias"}  # if they are integers
LONGEST_SHAPE = 8  # most numbers in a weight_shape


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, as listed in a header."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * DTYPE_BITS[self.dtype] // 8


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors that a safetensors file lists. Raises ModelError if the file is damaged or truncated."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path) as raw:
            if int.from_bytes(raw.read(8), "little") > LARGEST:
                raise ValueError(f"its header is larger than {LARGEST >> 20} MiB")
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
            tensors = {n: StoredTensor(path, n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error})", fix="download it again") from None
    if unknown := {tensor.dtype for tensor in tensors.values()} - DTYPE_BITS.keys():
        raise ModelError(f"{path} has numbers of type {min(unknown)}, which scoremode does not know", fix="update it")
    return tensors


def stored_bytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def sizes_of(tensors: Mapping[str, StoredTensor], quantization: object = None) -> ModelSizes | None:
    """Returns the size of a checkpoint and its parts, or None if a tensor's format is not understood.

    ``quantization`` is the config's ``quantization_config``, or MLX's ``quantization``. A weight that is stored
    twice counts twice.
    """
    counts = {name: _weights_in(name, tensors, quantization) for name in tensors}
    sized_tensors = [(name, tensors[name].bytes, count) for name, count in counts.items() if count is not None]
    if len(sized_tensors) < len(counts) or not any(count for _, _, count in sized_tensors):
        return None
    return add_up(sized_tensors)


def _weights_in(name: str, tensors: Mapping[str, StoredTensor], quantization: object) -> int | None:
    """Returns how many weights a tensor represents, or None if its format is not understood."""
    tensor, (prefix, _, leaf) = tensors[name], name.rpartition(".")
    if leaf in PACKED:
        return _packed_weights(tensor, tensors.get(f"{prefix}.weight_shape"), _packed_bits(quantization))
    if leaf == TRELLIS:
        return _trellis_weights(tensor)
    if isinstance(quantization, dict) and leaf in BESIDE_WEIGHTS:
        return 0
    if tensor.dtype == "U32" and leaf == "weight" and isinstance(quantization, dict):
        return _grouped_weights(tensor, tensors.get(f"{prefix}.scales"), quantization.get(prefix, quantization))
    if tensor.dtype in FLOAT_BITS or (tensor.dtype == "I8" and f"{prefix}.weight_scale" in tensors):
        return tensor.size
    return 0 if tensor.dtype == "BOOL" or leaf in BUFFERS else None


def _grouped_weights(packed: StoredTensor, scales: StoredTensor | None, declared: object) -> int | None:
    """Returns the number of weights in an MLX tensor, by its scales: one for each group. Its bits must fit, too."""
    group, bits = (declared.get(key) if isinstance(declared, dict) else None for key in ("group_size", "bits"))
    if scales is None or type(group) is not int or type(bits) is not int or not 0 < group <= 1 << 16:
        return None
    return scales.size * group if scales.size * group * bits == 32 * packed.size else None


def _trellis_weights(tensor: StoredTensor) -> int | None:
    """Returns the number of weights in an EXL3 tensor of 16 × 16 tiles: (tiles, tiles, 16-bit words of a tile)."""
    if tensor.dtype not in ("I16", "U16") or len(tensor.shape) != 3:
        return None
    return tensor.shape[0] * tensor.shape[1] * 256


def _packed_weights(packed: StoredTensor, shape: StoredTensor | None, bits: int | None) -> int | None:
    room = 8 * packed.bytes
    written = None if shape is None else _read_shape(shape)
    if written is None:  # a format whose packing leaves no gaps
        return None if bits is None else room // bits
    return written if written * (bits or 1) <= room else None


def _read_shape(tensor: StoredTensor) -> int | None:
    """Returns the number of weights by a ``weight_shape`` tensor. Only the data of such tensors is read."""
    if tensor.dtype != "I64" or not 0 < tensor.size <= LONGEST_SHAPE:
        return None
    from safetensors import safe_open

    with safe_open(tensor.file, framework="np") as file:
        numbers = file.get_tensor(tensor.name).reshape(-1).tolist()
    return math.prod(numbers) if min(numbers) > 0 else None


def _packed_bits(quantization: object) -> int | None:
    """Returns the bits per packed weight if the config states one number for all layers, else None."""
    if not isinstance(quantization, dict):
        return None
    groups = quantization.get("config_groups")
    num_bits: Sequence[object] = [quantization.get("bits")]  # GPTQ and AWQ
    if isinstance(groups, dict):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        num_bits = [w.get("num_bits") for w in weights if isinstance(w, dict)]
    bits = [b for b in num_bits if type(b) is int and 0 < b <= 16]
    return bits[0] if bits and bits == [bits[0]] * len(num_bits) else None
