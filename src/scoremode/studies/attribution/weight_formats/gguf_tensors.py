"""The weights of a GGUF file, de-quantized by the ``gguf`` package, under the names of a baseline's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scoremode.core.models.facts import layers_of_text
from scoremode.core.models.gguf import GgufFacts, GgufTensor
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.gguf_layouts import layout_of, names_in_files
from scoremode.studies.attribution.weight_formats.matching import OTHER
from scoremode.studies.attribution.weight_formats.stored import Shape, StoredWeight

if TYPE_CHECKING:
    import torch

TABLES = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight$")  # computed from the config in Transformers
ROTATED = re.compile(r"\.attn_([qk])\.(weight|bias)$")


class GgufTensors:
    """A TensorReader for a GGUF file. Tensors that no parameter needs keep the names of the file."""

    def __init__(self, label: str, facts: GgufFacts, baseline: Mapping[str, Shape], model_type: str) -> None:
        self._layout = layout_of(label, facts.architecture, model_type)
        self._label, self._facts = label, facts
        layers, expected = facts.number("block_count"), layers_of_text(baseline)
        if layers is None:
            raise ModelError(f"{label} does not say how many layers it has", fix="download it again")
        if expected is not None and layers != expected:
            raise ModelError(f"{label} has {layers} layers, and the baseline has {expected}", fix=OTHER)
        tensors = {tensor.name: tensor for tensor in facts.tensors if not TABLES.search(tensor.name)}
        wanted = names_in_files(facts.architecture, layers, iter(baseline))
        self._parts: dict[str, tuple[GgufTensor, ...]] = {
            parameter: tuple(tensors[name] for name in names)
            for parameter, names in wanted.items()
            if all(name in tensors for name in names)
        }
        used = {tensor.name for parts in self._parts.values() for tensor in parts}
        self._parts |= {name: (tensor,) for name, tensor in tensors.items() if name not in used}
        self.stored = {name: self._stored(name, parts, baseline.get(name)) for name, parts in self._parts.items()}

    def read(self, name: str) -> torch.Tensor:
        import torch

        pieces = [self._read_tensor(tensor) for tensor in self._parts[name]]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-2)
        return torch.from_numpy(np.ascontiguousarray(whole).reshape(self.stored[name].shape))

    def _read_tensor(self, tensor: GgufTensor) -> Any:
        values = dequantized(tensor)
        if rotated := ROTATED.search(tensor.name):
            if self._layout.rotates_pairs:
                values = self._in_halves(tensor.name, values, "head_count" if rotated[1] == "q" else "head_count_kv")
        elif self._layout.norm_offset and tensor.name.endswith("norm.weight"):
            values = values - np.float32(self._layout.norm_offset)
        return values.T if self._is_transposed(tensor) else values

    def _in_halves(self, name: str, values: Any, key: str) -> Any:
        """The rows of each head in Transformers' order: the first of all rotated pairs, then the second of all."""
        values_of, architecture = self._facts.values, self._facts.architecture
        heads = values_of.get(f"{architecture}.attention.{key}", values_of.get(f"{architecture}.attention.head_count"))
        if isinstance(heads, list):  # one number for each layer
            layer = int(name.split(".")[1])
            heads = heads[layer] if layer < len(heads) else None
        if not isinstance(heads, int) or heads < 1 or len(values) % (2 * heads):
            raise ModelError(f"{self._label} does not say how many heads {name} has", fix="download it again")
        return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    def _is_transposed(self, tensor: GgufTensor) -> bool:
        return self._layout.transposed and tensor.name.startswith("blk.") and len(tensor.shape) == 2

    def _stored(self, name: str, parts: tuple[GgufTensor, ...], expected: Shape | None) -> StoredWeight:
        shape = parts[0].shape
        if len(parts) > 1:
            shape = (*shape[:-2], sum(part.shape[-2] for part in parts), shape[-1])
        if self._is_transposed(parts[0]):
            shape = shape[::-1]
        if expected is not None and _without_ones(expected) == _without_ones(shape):
            shape = expected  # files leave out axes of length 1
        bits = 8 * sum(part.bytes for part in parts) / max(sum(part.weights for part in parts), 1)
        return StoredWeight(name, shape, bits, " + ".join(dict.fromkeys(part.type for part in parts)))


def dequantized(tensor: GgufTensor) -> Any:
    """The numbers of a tensor in float32, in memory of their own: (rows, columns)."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = np.fromfile(tensor.file, np.uint8, tensor.bytes, offset=tensor.begin)
    rows = tensor.weights // tensor.shape[-1] if tensor.shape and tensor.shape[-1] else 1
    try:
        values = dequantize(raw.reshape(rows, tensor.bytes // max(rows, 1)), GGMLQuantizationType[tensor.type])
    except NotImplementedError:
        raise ModelError(
            f"{tensor.name} of {tensor.file} has the type {tensor.type}, which the gguf package cannot de-quantize",
            fix="quantize it to another type",
        ) from None
    return values.reshape(tensor.shape).astype(np.float32, copy=False)


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
