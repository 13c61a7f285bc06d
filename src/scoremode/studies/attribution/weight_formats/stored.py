"""What is known about a candidate's weights without reading them, and how their files are read."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scoremode.core.models.facts import layers_of_text
from scoremode.core.models.safetensors import BESIDE_WEIGHTS, PACKED, StoredTensor, stored_bytes
from scoremode.core.models.sizes import EMBEDDING, HEAD
from scoremode.errors import ModelError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$")  # tells tokens their experts; nobody quantizes it
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OUTER = re.compile(r"^((model|transformer|language_model)\.)+")  # modules that files leave out, or name otherwise
OTHER = "give a version of the baseline: the same architecture, other weights"
OF_A_MATRIX = {"weight", *PACKED, *BESIDE_WEIGHTS}  # names of the tensors that store a matrix and its scales


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One tensor of a candidate, under the name that the baseline's Transformers model gives it."""

    name: str  # model.layers.3.self_attn.q_proj.weight
    shape: Shape
    bits: float  # stored bits per weight, scales and zero points included
    format: str  # Q4_K, W4A16 g128, bfloat16, …


Stored = Mapping[str, StoredWeight]


class TensorReader:
    """The weights of a candidate. Those that no parameter of the baseline needs are there too."""

    stored: Stored
    notes: tuple[str, ...] = ()  # what a reader of the results must know: what is approximated or left out

    def read(self, name: str) -> torch.Tensor:
        """One tensor, de-quantized, in float32."""
        raise NotImplementedError


def stored_weights(
    label: str,
    shapes: Mapping[str, Shape],
    files: Iterable[StoredTensor],
    formats: Mapping[str, str] | None = None,
    usual: str = "quantized",
) -> dict[str, StoredWeight]:
    """How the parameters of a model are stored in safetensors.

    ``formats`` has those of quantized matrices; others that are not plain floats, as quantized experts, have the
    ``usual`` format.

    A parameter that has no tensors of its own, as all experts of a layer that files store one by one, has the mean bits
    of all that is stored below its module.
    """
    modules: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in files:
        modules[_module_in_files(tensor.name)].append(tensor)
    stored = {}
    for name, shape in shapes.items():
        bits, dtypes = _stored(label, name, shapes, modules)
        plain = " + ".join(DTYPES.get(dtype, "") for dtype in dtypes)
        format_name = (formats or {}).get(name, plain if set(dtypes) <= DTYPES.keys() else usual)
        stored[name] = StoredWeight(name, shape, bits, format_name)
    return stored


def _stored(
    label: str, name: str, shapes: Mapping[str, Shape], modules: Mapping[str, list[StoredTensor]]
) -> tuple[float, list[str]]:
    """The bits per weight of a parameter, and the types of its tensors in files."""
    module, leaf = _module_in_files(name), name.rpartition(".")[2]
    leaves = OF_A_MATRIX if leaf == "weight" else {leaf}
    parts = [tensor for tensor in modules.get(module, ()) if tensor.name.rpartition(".")[2] in leaves]
    weights = math.prod(shapes[name])
    if not parts:
        parts = [tensor for path, tensors in modules.items() if path.startswith(f"{module}.") for tensor in tensors]
        weights = sum(math.prod(shape) for other, shape in shapes.items() if _module_in_files(other) == module)
    if not parts and HEAD.search(name):  # a copy of the embedding
        parts = [tensor for path, tensors in modules.items() if EMBEDDING.search(f"{path}.") for tensor in tensors]
        weights = math.prod(shapes[name])
    if not parts:
        message = f"the files of {label} have no tensors for {name}"
        raise ModelError(message, fix="save the model again with the Transformers of this machine")
    return 8 * stored_bytes(parts) / max(weights, 1), list(dict.fromkeys(tensor.dtype for tensor in parts))


def _module_in_files(name: str) -> str:
    """The module of a tensor, without what models and files name differently."""
    return OUTER.sub("", name).replace(".block_sparse_moe.", ".mlp.").rpartition(".")[0]


def require_layers(label: str, layers: int | None, baseline: Mapping[str, Shape]) -> None:
    expected = layers_of_text(baseline)
    if layers is not None and expected is not None and layers != expected:
        raise ModelError(f"{label} has {layers} layers, and the baseline has {expected}", fix=OTHER)
