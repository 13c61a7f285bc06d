"""Bits per weight, from headers written by hand, by make_checkpoints' library, and from hostile ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scoremode.core.models.facts import inspect
from scoremode.core.models.safetensors import StoredTensor, read_header, sizes_of, stored_bytes
from scoremode.errors import ModelError

INT4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


def saved(folder: Path, **tensors: torch.Tensor) -> Any:
    save_file({name.replace("__", "."): t for name, t in tensors.items()}, folder / "model.safetensors")
    return read_header(folder / "model.safetensors")


def bits_per_weight(tensors: dict[str, StoredTensor], quantization: object = None) -> float | None:
    sizes = sizes_of(tensors, quantization)
    return None if sizes is None else sizes.bits_per_weight


def write_header(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 16), (torch.float8_e4m3fn, 8)])
def test_plain_weights_take_the_bits_of_their_dtype(tmp_path: Path, dtype: torch.dtype, bits: int) -> None:
    found = saved(tmp_path, a__weight=torch.zeros(6, 8, dtype=dtype), a__bias=torch.zeros(6, dtype=dtype))
    assert bits_per_weight(found) == bits
    assert stored_bytes(found.values()) == 54 * bits // 8


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


GPTQ = {
    "a__qweight": zeros(torch.int32, 8, 16),
    "a__qzeros": zeros(torch.int32, 1, 2),
    "a__scales": zeros(torch.float16, 1, 16),
    "a__g_idx": zeros(torch.int32, 64),
}
MIXED = {"config_groups": {n: {"weights": {"num_bits": n}} for n in (4, 8)}}
PACKED = {"a__weight_packed": zeros(torch.int32, 2, 1)}
INT8 = {"a__weight": zeros(torch.int8, 4, 8), "a__weight_scale": torch.zeros(4, 1)}
COUNTED: dict[str, tuple[dict[str, torch.Tensor], object, float | None]] = {
    "by their shape and not their padding: 3 rows of 12, the second integer half empty": (
        {
            "a__weight_packed": zeros(torch.int32, 3, 2),
            "a__weight_shape": torch.tensor([3, 12]),
            "a__weight_scale": zeros(torch.bfloat16, 3, 1),
        },
        INT4,
        8 * (24 + 16 + 6) / 36,
    ),
    "scales and zero points are bits but no weights": (
        {"embed__weight": torch.zeros(5, 8), **INT8, "a__weight_zero_point": zeros(torch.int8, 4, 1)},
        INT4,
        8 * (160 + 32 + 16 + 4) / 72,
    ),
    "packed floats of four bits have no shape beside them": (
        {
            "a__weight_packed": zeros(torch.uint8, 4, 16),
            "a__weight_scale": zeros(torch.float8_e4m3fn, 4, 2),
            "a__weight_global_scale": torch.zeros(1),
        },
        INT4,
        8 * (64 + 8 + 4) / 128,
    ),
    "GPTQ says its bits in one place": (GPTQ, {"quant_method": "gptq", "bits": 4}, 8 * (512 + 8 + 32 + 256) / 1024),
    "GPTQ without its bits": (GPTQ, {"quant_method": "gptq"}, None),
    "positions are no weights": (
        {"a__weight": torch.zeros(64), "a__position_ids": zeros(torch.int64, 16)},
        None,
        8 * (256 + 128) / 64,
    ),
    "layers of different bits": (PACKED, MIXED, None),
    "layers of different bits, by their shapes": ({**PACKED, "a__weight_shape": torch.tensor([2, 8])}, MIXED, 12),
}


@pytest.mark.parametrize("name", COUNTED)
def test_weights_of_quantized_formats(tmp_path: Path, name: str) -> None:
    tensors, quantization, bits = COUNTED[name]
    assert bits_per_weight(saved(tmp_path, **tensors), quantization) == bits


@pytest.mark.parametrize(
    "config",
    [None, {}, {"config_groups": 3}, {"config_groups": {"a": None}}, {"bits": "4"}, {"bits": -4}, {"bits": True}],
)
def test_what_is_not_understood_gives_no_number(tmp_path: Path, config: object) -> None:
    found = saved(tmp_path, a__weight_packed=torch.zeros(3, 2, dtype=torch.int32), b__weight=torch.zeros(4))
    assert bits_per_weight(found, config) is None


@pytest.mark.parametrize("tensor", [torch.zeros(8, dtype=torch.int16), torch.zeros(8, dtype=torch.uint8)])
def test_an_unknown_format_of_integers_gives_no_number(tmp_path: Path, tensor: torch.Tensor) -> None:
    assert bits_per_weight(saved(tmp_path, a__trellis=tensor, b__weight=torch.zeros(4)), INT4) is None


@pytest.mark.parametrize("shape", [[2**62, 2**62], [3, 4000], [-3, -8]])
def test_a_shape_that_cannot_be_gives_no_wrong_number(tmp_path: Path, shape: list[int]) -> None:
    packed = torch.zeros(3, 1, dtype=torch.int32)
    found = saved(tmp_path, a__weight_packed=packed, a__weight_shape=torch.tensor(shape))
    assert bits_per_weight(found, INT4) in (None, 8 * (12 + 16) / 24)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", 0),
        (b"[" * 1000, 8),
        ({"a": {**ENTRY, "shape": [3]}}, 8),
        ({"a": {**ENTRY, "shape": [2**63 - 1] * 1000}}, 8),
        ({"a": ENTRY, "b": ENTRY}, 16),
        ({"a": ENTRY}, 7),
    ],
)
def test_a_damaged_or_truncated_file_is_refused_in_one_line(tmp_path: Path, header: object, data: int) -> None:
    path = write_header(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        read_header(path)


@pytest.mark.parametrize(("said", "bits"), [(4.5, 4.5), (None, 32), ("4", 32), (-1, 32), (True, 32), (1e999, 32)])
def test_a_checkpoint_that_emulates_says_its_bits_itself(tmp_path: Path, said: object, bits: float) -> None:
    saved(tmp_path, a__weight=torch.zeros(4))
    (tmp_path / "config.json").write_text(json.dumps({"bits_per_weight": said}))
    assert inspect(str(tmp_path)).bits_per_weight == bits
