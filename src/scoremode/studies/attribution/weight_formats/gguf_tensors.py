"""The weights of a GGUF file, de-quantized by the ``gguf`` package, under the names of a baseline's parameters.

llama.cpp lays out each architecture in its own way; what differs from Transformers was read in its converters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scoremode.core.models.gguf import GgufFacts, GgufTensor
from scoremode.core.reading import open_regular
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import (
    OTHER,
    Shape,
    StoredWeight,
    TensorReader,
    require_layers,
)

if TYPE_CHECKING:
    import torch


LAYOUTS = {  # architectures whose files can be read, and their types in Transformers
    **{"llama": ("llama", "mistral", "mixtral"), "mistral3": ("mistral", "ministral3"), "granite": ("granite",)},
    **{"arcee": ("arcee",), "smollm3": ("smollm3",), "olmo": ("olmo",), "olmo2": ("olmo2", "olmo3")},
    **{"olmoe": ("olmoe",), "gemma": ("gemma",), "gemma2": ("gemma2",), "gemma3": ("gemma3_text",)},
    **{"nemotron": ("nemotron",), "gpt2": ("gpt2",), "qwen2": ("qwen2",), "qwen2moe": ("qwen2_moe",)},
    **{"qwen3": ("qwen3",), "qwen3moe": ("qwen3_moe",), "phi2": ("phi",), "phi3": ("phi3",), "stablelm": ("stablelm",)},
    **{"starcoder2": ("starcoder2",), "command-r": ("cohere",), "seed_oss": ("seed_oss",), "exaone4": ("exaone4",)},
    **{"glm4": ("glm4",)},
}
# rows of q and k are in another order, because llama.cpp rotates neighbours
ROTATES_PAIRS = ("llama", "mistral3", "granite", "arcee", "smollm3", "olmo")
NORMS_PLUS_1 = ("gemma", "gemma2", "gemma3", "nemotron")  # stored norms have a 1 that Transformers adds later
TRANSPOSED = ("gpt2",)  # the matrices of layers are (input, output) in Transformers


def names_in_files(architecture: str, layers: int, parameters: Iterator[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of a GGUF file that hold each parameter: one, or gate and up of all experts."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, layers)
    names_by_parameter: dict[str, tuple[str, ...]] = {}
    for parameter in parameters:
        stem, dot, leaf = parameter.rpartition(".")
        suffix = dot + leaf if leaf in ("weight", "bias") else ""
        stem = stem if suffix else parameter
        gate, up = (names.get_name(stem.replace("gate_up_proj", piece)) for piece in ("gate_proj", "up_proj"))
        if stem.endswith("experts.gate_up_proj") and gate and up:
            names_by_parameter[parameter] = (f"{gate}.weight", f"{up}.weight")
        elif name := names.get_name(stem):
            names_by_parameter[parameter] = (f"{name}{suffix or '.weight'}",)
    return names_by_parameter


TABLES = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight$")  # computed from the config in Transformers
ROTATED = re.compile(r"\.attn_([qk])\.(weight|bias)$")


class GgufTensors(TensorReader):
    """A GGUF file. Tensors that no parameter needs keep the names of the file."""

    def __init__(self, label: str, facts: GgufFacts, baseline: Mapping[str, Shape], model_type: str) -> None:
        self._label, self._facts, self._architecture = label, facts, facts.architecture
        if facts.architecture not in LAYOUTS:
            message = f"{label} is a GGUF file of the architecture {facts.architecture}"
            fix = f"known: {', '.join(sorted(LAYOUTS))}; or give a checkpoint in safetensors"
            raise ModelError(f"{message}, whose layout scoremode does not know", fix=fix)
        if model_type and model_type not in LAYOUTS[facts.architecture]:
            message = f"{label} is a {facts.architecture} model, and the baseline is a {model_type} model"
            raise ModelError(message, fix=OTHER)
        layers = facts.number("block_count")
        if layers is None:
            raise ModelError(f"{label} does not say how many layers it has", fix="download it again")
        require_layers(label, layers, baseline)
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
            if self._architecture in ROTATES_PAIRS:
                values = self._in_halves(tensor.name, values, "head_count" if rotated[1] == "q" else "head_count_kv")
        elif self._architecture in NORMS_PLUS_1 and tensor.name.endswith("norm.weight"):
            values = values - np.float32(1)
        return values.T if self._is_transposed(tensor) else values

    def _in_halves(self, name: str, values: Any, key: str) -> Any:
        """The rows of each head in Transformers' order: the first of all rotated pairs, then the second of all."""
        metadata, prefix = self._facts.values, f"{self._architecture}.attention"
        heads = metadata.get(f"{prefix}.{key}", metadata.get(f"{prefix}.head_count"))
        if isinstance(heads, list):
            message = f"{self._label} has one number of heads for each layer, which scoremode does not read"
            raise ModelError(message, fix="give a checkpoint in safetensors")
        if not isinstance(heads, int) or heads < 1 or len(values) % (2 * heads):
            raise ModelError(f"{self._label} does not say how many heads {name} has", fix="download it again")
        return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    def _is_transposed(self, tensor: GgufTensor) -> bool:
        return self._architecture in TRANSPOSED and tensor.name.startswith("blk.") and len(tensor.shape) == 2

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

    with open_regular(tensor.file) as file:
        raw = np.fromfile(file, np.uint8, tensor.bytes, offset=tensor.begin)
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
