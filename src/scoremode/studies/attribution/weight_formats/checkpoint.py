"""Tensors of a safetensors checkpoint that are stored as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scoremode.core.models.safetensors import FLOAT_BITS, StoredTensor
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import StoredWeight

if TYPE_CHECKING:
    import torch

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class PlainTensors:
    """A TensorReader for the floating-point tensors among ``tensors``, a checkpoint's header."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        self.stored = {
            name: StoredWeight(name, tensor.shape, FLOAT_BITS[tensor.dtype], DTYPES[tensor.dtype])
            for name, tensor in tensors.items()
            if tensor.dtype in DTYPES
        }

    def read(self, name: str) -> torch.Tensor:
        return self.raw(name).float()

    def raw(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, in memory of its own."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.tensors[name].file, framework="pt") as file:
                found: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.tensors[name].file} cannot be read ({error})", fix="download it again") from None
        return found.clone()
