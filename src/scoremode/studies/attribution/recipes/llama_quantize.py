"""A mixture as a list of tensor types for llama-quantize: ``--tensor-type-file``, one regular expression per line."""

from __future__ import annotations

import math
import re
from collections import Counter

from scoremode.core.models.facts import layers_of_text
from scoremode.studies.attribution.recipes.mixture import Mixture, WrittenRecipe, counted
from scoremode.studies.attribution.weight_formats.gguf_tensors import LAYOUTS, names_in_files
from scoremode.studies.attribution.weight_formats.stored import StoredWeight

PLAIN = {"float64": "F32", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NEAREST = ("Q2_K", "Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0", "F16")  # for formats that are no types of GGUF files
WRITABLE = (  # types that llama-quantize writes without an importance matrix
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0", "MXFP4"),
)
ROUTERS = re.compile(r"ffn_gate_inp")  # never quantized by llama-quantize
BASES = {"Q2_K": "Q2_K", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
BASE = "Q8_0"  # of tensors that the file does not list


def llama_quantize_recipe(mixture: Mixture) -> WrittenRecipe | None:
    """The recipe; None if the layout of the architecture in GGUF files is not known."""
    architecture = next((name for name, layout in LAYOUTS.items() if mixture.model_type in layout.model_types), None)
    layers = layers_of_text(mixture.parameters)
    if architecture is None or layers is None:
        return None
    matrices = {weight.name: weight for weight in mixture.matrices}
    names = names_in_files(architecture, layers, iter(matrices))
    chosen: dict[str, str] = {}
    before, after = [], []  # bits per weight and the number of weights, of each matrix
    near = imatrix = 0
    for parameter, weight in matrices.items():
        before.append((weight.bits, math.prod(weight.shape)))
        after.append((bits_of(type_of(weight)), math.prod(weight.shape)))
        for name in names.get(parameter, ()):
            if ROUTERS.search(name):
                continue
            chosen[name] = type_of(weight)
            near += chosen[name] != PLAIN.get(weight.format, weight.format)
            imatrix += chosen[name] not in WRITABLE
    text = "".join(f"^{re.escape(name)}$={kind.lower()}\n" for name, kind in chosen.items())
    notes = []
    if near:
        notes.append(f"{counted(near, 'matrix')} get the nearest type of GGUF files, which rounds in its own way")
        notes.append(
            f"the matrices take {_mean(after):.3g} bits per weight in these types, and {_mean(before):.3g} as measured"
        )
    if imatrix:
        notes.append("some types need an importance matrix: add --imatrix FILE")
    if missing := len(matrices.keys() - names.keys()):
        notes.append(f"{counted(missing, 'matrix')} have no name in GGUF files and are left to llama-quantize")
    most = Counter(kind for kind in chosen.values() if kind not in ("F32", "F16", "BF16")).most_common(1)
    base = BASES.get(most[0][0], most[0][0]) if most else BASE
    command = f"llama-quantize --tensor-type-file FILE model-f32.gguf model-mixed.gguf {base}"
    return WrittenRecipe("llama-quantize", ".llama-quantize.txt", text, command, tuple(notes))


def type_of(weight: StoredWeight) -> str:
    """The type of a GGUF tensor for a stored weight: its own, or the nearest in bits that its rows can be cut into.

    >>> type_of(StoredWeight("w", (64, 576), 4.5, "rtn 4 bit g32"))
    'Q4_0'
    """
    from gguf.constants import GGMLQuantizationType

    kind = PLAIN.get(weight.format, weight.format)
    if kind in GGMLQuantizationType.__members__:
        return kind
    fitting = {name: bits_of(name) for name in NEAREST if weight.shape[-1] % _block(name)[0] == 0}
    return min(fitting, key=lambda name: (abs(fitting[name] - weight.bits), fitting[name]))


def bits_of(kind: str) -> float:
    """The bits per weight of a type.

    >>> bits_of("Q4_0")
    4.5
    """
    block, stored = _block(kind)
    return 8 * stored / block


def _block(kind: str) -> tuple[int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, stored = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(block), int(stored)


def _mean(parts: list[tuple[float, int]]) -> float:
    return sum(bits * count for bits, count in parts) / max(sum(count for _, count in parts), 1)
