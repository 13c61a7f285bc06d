"""Checkpoints of the method ``fp8``: numbers of 8 bits, with one scale for each block, or one for a whole matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import PlainTensors, Shape, StoredWeight

if TYPE_CHECKING:
    import torch

NUMBERS = ("F8_E4M3", "F8_E5M2")
SCALES = ("weight_scale_inv", "weight_scale")
BESIDE = (*SCALES, "input_scale", "activation_scale")


class Float8Tensors:
    def __init__(self, label: str, plain: PlainTensors, quantization: Mapping[str, Any]) -> None:
        self._plain, self._label = plain, label
        self._block = _block_size(label, quantization)
        tensors = plain.tensors
        numbers = [name for name in tensors if tensors[name].dtype in NUMBERS and name.endswith(".weight")]
        self._scales = {name: self._scale_of(name) for name in numbers}
        self.stored = {
            name: stored for name, stored in plain.stored.items() if not name.endswith(tuple(f".{x}" for x in BESIDE))
        }
        self.stored |= {name: self._stored(name) for name in numbers}
        self.notes = (f"{label} also rounds activations; here only its weights are put in",)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._scales:
            return self._plain.read(name)
        weight, scale = self._plain.read(name), self._plain.read(self._scales[name])
        if scale.numel() == 1:
            return weight * scale.reshape(1, 1)
        rows, columns = self._block if scale.shape != (len(weight), 1) else (1, weight.shape[1])
        whole = scale.repeat_interleave(rows, 0)[: len(weight)]
        return weight * whole.repeat_interleave(columns, 1)[:, : weight.shape[1]]

    def _scale_of(self, name: str) -> str:
        """The scales of a matrix; ModelError if there are none, or not as many as it has blocks."""
        module, shape = name.removesuffix(".weight"), self._plain.tensors[name].shape
        scale = next((f"{module}.{leaf}" for leaf in SCALES if f"{module}.{leaf}" in self._plain.stored), None)
        if scale is None:
            raise ModelError(f"{self._label} has no scale for {name}", fix="download it again")
        found = self._plain.tensors[scale].shape
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or (math.prod(found) != 1 and found not in (blocks, (shape[0], 1))):
            raise ModelError(
                f"{scale} of {self._label} does not have one number for each block", fix="download it again"
            )
        return scale

    def _stored(self, name: str) -> StoredWeight:
        tensors, module = self._plain.tensors, name.removesuffix(".weight")
        parts = [tensors[key] for leaf in ("weight", *BESIDE) if (key := f"{module}.{leaf}") in tensors]
        shape: Shape = tensors[name].shape
        bits = 8 * sum(part.end - part.begin for part in parts) / max(math.prod(shape), 1)
        is_whole = math.prod(tensors[self._scales[name]].shape) == 1
        return StoredWeight(name, shape, bits, "FP8" if is_whole else f"FP8 blocks {self._block[0]}×{self._block[1]}")


def _block_size(label: str, quantization: Mapping[str, Any]) -> tuple[int, int]:
    given = quantization.get("weight_block_size") or [1, 1]
    if not isinstance(given, list) or len(given) != 2 or not all(type(n) is int and n > 0 for n in given):
        raise ModelError(f"the config of {label} gives {given} as the size of a block", fix="download it again")
    return given[0], given[1]
