"""A mixture of precisions in the words of the tools that can make it: llm-compressor and llama-quantize.

llm-compressor   one group of its QuantizationModifier per precision, and an ignore list
llama-quantize   a list of tensor types (--tensor-type-file), one regular expression per line

Weights only, as they were measured. What a tool has no format for gets the nearest.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.core.models.facts import layers_of_text
from scoremode.core.models.sizes import EMBEDDING
from scoremode.studies.attribution.weight_formats.gguf_tensors import LAYOUTS, names_in_files
from scoremode.studies.attribution.weight_formats.matching import EXPERTS
from scoremode.studies.attribution.weight_formats.stored import ROUTER, StoredWeight

INTEGERS = re.compile(r"(?:rtn |GPTQ |AWQ )(\d+) bit|W(\d+)A\d+")
GROUP = re.compile(r"\bg(\d+)\b")
BLOCK = re.compile(r"blocks (\d+)×(\d+)")
FOUR_BIT_FLOATS: dict[str, dict[str, Any]] = {
    "NVFP4": {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    "MXFP4": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}
NEAREST_GROUP = 32  # of integers in place of a format that compressed-tensors does not have
ONESHOT = 'python -c "from llmcompressor import oneshot; oneshot(model=MODEL, recipe=FILE, output_dir=OUT)"'
LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Mixture:
    """The chosen form of each parameter."""

    model_type: str  # of the baseline's config
    parameters: Mapping[str, StoredWeight]  # by name; each as the candidate that was chosen for it stores it

    @property
    def matrices(self) -> Iterator[StoredWeight]:
        """What tools quantize: everything with more than one axis but routers of experts."""
        return (w for w in self.parameters.values() if len(w.shape) > 1 and not ROUTER.search(w.name))


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    tool: str
    suffix: str  # of its file, after the prefix that the user gave
    text: str
    command: str  # what to type, with FILE for the recipe's file


def write_recipes(mixture: Mixture) -> list[WrittenRecipe]:
    found = [llm_compressor_recipe(mixture), llama_quantize_recipe(mixture)]
    return [recipe for recipe in found if recipe is not None]


# ── llm-compressor ────────────────────────────────────────────────────────────────────────────────────────────────────
def llm_compressor_recipe(mixture: Mixture) -> WrittenRecipe:
    """The recipe; matrices that keep their numbers and, as usual, the embedding are not targets."""
    groups: dict[str, list[str]] = {}
    kept = [w.name.removesuffix(".weight") for w in mixture.parameters.values() if ROUTER.search(w.name)]
    for weight in mixture.matrices:
        if not EMBEDDING.search(weight.name):
            how = arguments_of(weight)
            (kept if how is None else groups.setdefault(json.dumps(how), [])).extend(modules_of(weight))
    numbered = {
        f"group_{number}": {"weights": json.loads(weights), "targets": patterns(modules)}
        for number, (weights, modules) in enumerate(groups.items())
    }
    modifier = {"QuantizationModifier": {"ignore": patterns(kept), "config_groups": numbered}}
    text = json.dumps({"quant_stage": {"quant_modifiers": modifier}}, indent=2) + "\n"  # JSON is YAML, too
    return WrittenRecipe("llm-compressor", ".llm-compressor.yaml", text, ONESHOT)


def modules_of(weight: StoredWeight) -> tuple[str, ...]:
    """The modules that a matrix consists of in files, where the experts of a layer are stored one by one: ``*``.

    >>> modules_of(StoredWeight("model.layers.0.mlp.experts.gate_up_proj", (8, 4, 2), 16, "bfloat16"))
    ('model.layers.0.mlp.experts.*.gate_proj', 'model.layers.0.mlp.experts.*.up_proj')
    """
    module, _, leaf = weight.name.rpartition(".")
    if len(weight.shape) != 3 or f"experts.{leaf}" not in EXPERTS:
        return (weight.name.removesuffix(".weight"),)
    return tuple(f"{module}.*.{piece}" for piece in EXPERTS[f"experts.{leaf}"][0])


def arguments_of(weight: StoredWeight) -> dict[str, Any] | None:
    """The arguments of compressed-tensors for weights of this format; None if they stay 16 bits or more.

    >>> arguments_of(StoredWeight("w", (4, 64), 4.5, "rtn 4 bit g32"))["group_size"]
    32
    """
    name, group, block = weight.format, GROUP.search(weight.format), BLOCK.search(weight.format)
    found, is_float = INTEGERS.search(name), name.startswith(("FP8", *FOUR_BIT_FLOATS))
    size = None
    if is_float:
        bits = 8 if name.startswith("FP8") else 4
    elif found:
        bits, size = int(found[1] or found[2]), int(group[1]) if group else None
    else:  # of GGUF files and EXL3: the nearest integers, and floats of 16 bits and more
        bits, size = math.floor(weight.bits), NEAREST_GROUP
        bits = min(max(bits, 2), 8) if bits < 16 else bits
    if bits >= 16:
        return None
    is_symmetric = is_float or bool(found and not name.startswith("AWQ") and " asym" not in name)
    common = {"num_bits": bits, "type": "float" if is_float else "int", "symmetric": is_symmetric, "dynamic": False}
    if name[:5] in FOUR_BIT_FLOATS:
        return {**common, **FOUR_BIT_FLOATS[name[:5]]}
    if block:
        return {**common, "strategy": "block", "block_structure": [int(block[1]), int(block[2])]}
    return {**common, "strategy": "channel"} if size is None else {**common, "strategy": "group", "group_size": size}


def patterns(modules: Iterable[str]) -> list[str]:
    """Module names as regular expressions of llm-compressor, one for each kind of module.

    >>> patterns(["model.layers.0.mlp.up_proj", "model.layers.7.mlp.up_proj", "lm_head"])
    ['re:model\\\\.layers\\\\.(0|7)\\\\.mlp\\\\.up_proj$', 'lm_head']
    """
    kinds: dict[str, list[int]] = {}
    for module in modules:
        layer = LAYER_NUMBER.search(module)
        kind = f"{module[: layer.start(1)]}#{module[layer.end(1) :]}" if layer else module
        kinds.setdefault(kind, []).extend([int(layer[1])] if layer else [])
    return [_pattern(kind, layers) for kind, layers in kinds.items()]


def _pattern(kind: str, layers: list[int]) -> str:
    before, found, after = kind.partition("#")
    if not found:
        return kind
    numbers, after = "|".join(map(str, sorted(layers))), re.escape(after).replace(r"\*", r"\d+")
    return f"re:{re.escape(before)}({numbers}){after}$"


# ── llama-quantize ────────────────────────────────────────────────────────────────────────────────────────────────────
PLAIN_TYPES = {"float64": "F32", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NEAREST = ("Q2_K", "Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0", "F16")  # for formats that are no types of GGUF files
BASES = {"Q2_K": "Q2_K", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
BASE = "Q8_0"  # of tensors that the file does not list


def llama_quantize_recipe(mixture: Mixture) -> WrittenRecipe | None:
    """The recipe; None if the layout of the architecture in GGUF files is not known."""
    architecture = next((name for name, types in LAYOUTS.items() if mixture.model_type in types), None)
    layers = layers_of_text(mixture.parameters)
    if architecture is None or layers is None:
        return None
    matrices = {weight.name: weight for weight in mixture.matrices}
    names = names_in_files(architecture, layers, iter(matrices))
    chosen = {
        name: type_of(weight)
        for parameter, weight in matrices.items()
        for name in names.get(parameter, ())
        if "ffn_gate_inp" not in name  # routers: never quantized by llama-quantize
    }
    text = "".join(f"^{re.escape(name)}$={kind.lower()}\n" for name, kind in chosen.items())
    most = Counter(kind for kind in chosen.values() if kind not in PLAIN_TYPES.values()).most_common(1)
    base = BASES.get(most[0][0], most[0][0]) if most else BASE
    command = f"llama-quantize --tensor-type-file FILE model-f32.gguf model-mixed.gguf {base}"
    return WrittenRecipe("llama-quantize", ".llama-quantize.txt", text, command)


def type_of(weight: StoredWeight) -> str:
    """The type of a GGUF tensor for a stored weight: its own, or the nearest in bits that its rows can be cut into.

    >>> type_of(StoredWeight("w", (64, 576), 4.5, "rtn 4 bit g32"))
    'Q4_0'
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = PLAIN_TYPES.get(weight.format, weight.format)
    if kind in GGMLQuantizationType.__members__:
        return kind
    sizes = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in NEAREST}  # weights, and bytes, of a block
    fitting = {name: 8 * stored / block for name, (block, stored) in sizes.items() if weight.shape[-1] % block == 0}
    return min(fitting, key=lambda name: (abs(fitting[name] - weight.bits), fitting[name]))
