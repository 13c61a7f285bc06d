"""What is known about a candidate's weights, and the readers of checkpoints: plain tensors, and quantized modules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scoremode.core.models.safetensors import FLOAT_BITS, StoredTensor
from scoremode.errors import ModelError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$")  # tells tokens their experts; nobody quantizes it
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OTHER_FORMAT = "give a checkpoint in another format, such as compressed-tensors or GGUF"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One tensor of a candidate, under the name that the baseline's Transformers model gives it."""

    name: str  # model.layers.3.self_attn.q_proj.weight
    shape: Shape
    bits: float  # stored bits per weight, scales and zero points included
    format: str  # Q4_K, W4A16 g128, bfloat16, …


class TensorReader:
    """The tensors of a file format, under the names of the file. What is quantized appears as ``….weight``."""

    stored: Mapping[str, StoredWeight]
    notes: tuple[str, ...] = ()  # what a reader of the results must know: what is approximated or left out

    def read(self, name: str) -> torch.Tensor:
        """One tensor, de-quantized, in float32. Nothing is kept, so memory does not grow with the model."""
        raise NotImplementedError


class PlainTensors(TensorReader):
    """The floating-point tensors among ``tensors``, a checkpoint's header."""

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
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.tensors[name].file} cannot be read ({error})", fix="download it again") from None
        return tensor.clone()


class ModuleTensors(TensorReader):
    """Checkpoints that store a quantized matrix as several tensors of its module.

    A subclass says which modules are quantized, what their shapes and formats are, and how they are decoded. All other
    tensors are read as they are.
    """

    leaves: tuple[str, ...]  # the names of tensors that may belong to a quantized matrix
    marks: tuple[str, ...]  # a module that has one of these is quantized
    never_weights: Iterable[str] = ()  # names of tensors that are not weights in any module

    def __init__(self, label: str, plain: PlainTensors) -> None:
        self.label, self.plain = label, plain
        split = (name.rpartition(".") for name in plain.tensors)
        modules = {f"{module}.weight": module for module, _, leaf in split if leaf in self.marks}
        beside = {f"{module}.{leaf}" for module in modules.values() for leaf in self.leaves}
        self._modules = modules
        self.stored = {
            name: stored
            for name, stored in plain.stored.items()
            if name not in beside and name.rpartition(".")[2] not in self.never_weights
        } | {name: self._stored(name, module) for name, module in modules.items()}

    def read(self, name: str) -> torch.Tensor:
        module = self._modules.get(name)
        return self.plain.read(name) if module is None else self._decoded(module, self.stored[name].shape)

    def parts_of(self, module: str) -> dict[str, StoredTensor]:
        tensors = self.plain.tensors
        return {leaf: tensors[name] for leaf in self.leaves if (name := f"{module}.{leaf}") in tensors}

    def require(self, is_right: bool, module: str) -> None:
        if not is_right:
            message = f"the tensors of {module} in {self.label} are missing, damaged, or do not fit its config"
            raise ModelError(message, fix="download it again")

    def _stored(self, name: str, module: str) -> StoredWeight:
        parts = self.parts_of(module)
        shape, kind = self._described(module, parts)
        bits = 8 * sum(part.bytes for part in parts.values()) / max(math.prod(shape), 1)
        return StoredWeight(name, shape, bits, kind)

    def _described(self, module: str, parts: Mapping[str, StoredTensor]) -> tuple[Shape, str]:
        """The shape of a quantized matrix, and its format; ModelError if its parts cannot be right."""
        raise NotImplementedError

    def _decoded(self, module: str, shape: Shape) -> torch.Tensor:
        """A quantized matrix: float32, on the CPU."""
        raise NotImplementedError
