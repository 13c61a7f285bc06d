"""The weights of a GGUF file, de-quantized by the ``gguf`` package, under the names of a baseline's parameters.

llama.cpp lays out each architecture in its own way; LAYOUTS has what differs from Transformers, read in its converters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scoremode.core.models.facts import layers_of_text
from scoremode.core.models.gguf import GgufFacts, GgufTensor
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.matching import OTHER
from scoremode.studies.attribution.weight_formats.stored import Shape, StoredWeight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """What differs from Transformers, for one architecture of GGUF files."""

    model_types: tuple[str, ...]  # of Transformers
    rotates_pairs: bool = False  # the rows of q and k are in another order, because llama.cpp rotates neighbours
    norm_offset: float = 0.0  # is part of the stored norms; Transformers adds it when it computes
    transposed: bool = False  # the matrices of layers are (input, output) in Transformers


LAYOUTS = {
    "llama": Layout(("llama", "mistral", "mixtral"), rotates_pairs=True),
    "mistral3": Layout(("mistral", "ministral3"), rotates_pairs=True),
    "granite": Layout(("granite",), rotates_pairs=True),
    "arcee": Layout(("arcee",), rotates_pairs=True),
    "smollm3": Layout(("smollm3",), rotates_pairs=True),
    "olmo": Layout(("olmo",), rotates_pairs=True),
    "gemma": Layout(("gemma",), norm_offset=1.0),
    "gemma2": Layout(("gemma2",), norm_offset=1.0),
    "gemma3": Layout(("gemma3_text",), norm_offset=1.0),
    "nemotron": Layout(("nemotron",), norm_offset=1.0),
    "gpt2": Layout(("gpt2",), transposed=True),
    "qwen2": Layout(("qwen2",)),
    "qwen2moe": Layout(("qwen2_moe",)),
    "qwen3": Layout(("qwen3",)),
    "qwen3moe": Layout(("qwen3_moe",)),
    "phi2": Layout(("phi",)),
    "phi3": Layout(("phi3",)),
    "stablelm": Layout(("stablelm",)),
    "starcoder2": Layout(("starcoder2",)),
    "olmo2": Layout(("olmo2", "olmo3")),
    "olmoe": Layout(("olmoe",)),
    "command-r": Layout(("cohere",)),
    "seed_oss": Layout(("seed_oss",)),
    "exaone4": Layout(("exaone4",)),
    "glm4": Layout(("glm4",)),
}


def layout_of(label: str, architecture: str, model_type: str) -> Layout:
    layout = LAYOUTS.get(architecture)
    if layout is None:
        raise ModelError(
            f"{label} is a GGUF file of the architecture {architecture}, whose layout scoremode does not know",
            fix=f"known: {', '.join(sorted(LAYOUTS))}; or give a checkpoint in safetensors",
        )
    if model_type and model_type not in layout.model_types:
        raise ModelError(
            f"{label} is a {architecture} model, and the baseline is a {model_type} model",
            fix="give a version of the baseline: the same architecture, other weights",
        )
    return layout


def names_in_files(architecture: str, layers: int, parameters: Iterator[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of a GGUF file that hold each parameter: one, or gate and up of all experts."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, layers)
    found: dict[str, tuple[str, ...]] = {}
    for parameter in parameters:
        stem, dot, leaf = parameter.rpartition(".")
        suffix = dot + leaf if leaf in ("weight", "bias") else ""
        stem = stem if suffix else parameter
        gate, up = (names.get_name(stem.replace("gate_up_proj", piece)) for piece in ("gate_proj", "up_proj"))
        if stem.endswith("experts.gate_up_proj") and gate and up:
            found[parameter] = (f"{gate}.weight", f"{up}.weight")
        elif name := names.get_name(stem):
            found[parameter] = (f"{name}{suffix or '.weight'}",)
    return found


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
