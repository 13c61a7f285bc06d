"""A mixture of precisions in the words of the tools that can make it: llm-compressor, llama-quantize, ExLlamaV3.

llm-compressor   one group of its QuantizationModifier per precision, and an ignore list
llama-quantize   a list of tensor types (--tensor-type-file), one regular expression per line
ExLlamaV3        its converter takes one mean for a model, so whole conversions are mixed: util/recompile.py copies one
                 of them and takes some tensors from others, as a file in YAML says

Weights only, as they were measured. What a tool has no format for gets the nearest.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scoremode.core.models.facts import layers_of_text
from scoremode.core.models.sizes import EMBEDDING
from scoremode.studies.attribution.weight_formats.gguf_tensors import LAYOUTS, names_in_files
from scoremode.studies.attribution.weight_formats.stored import ROUTER, StoredWeight

Parameters = Mapping[str, StoredWeight]  # each as the candidate that was chosen for it stores it

EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of one expert, in files
INTEGERS = re.compile(r"(?:rtn |GPTQ |AWQ )(\d+) bit|W(\d+)A\d+")
GROUP = re.compile(r"\bg(\d+)\b")
FLOATS: dict[str, dict[str, int | str]] = {
    "FP8": {"num_bits": 8, "strategy": "channel"},
    "NVFP4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    "MXFP4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}
NEAREST_GROUP = 32  # of integers in place of a format that compressed-tensors does not have
LLM_COMPRESSOR = ".llm-compressor.yaml"
ONESHOT = 'python -c "from llmcompressor import oneshot; oneshot(model=MODEL, recipe=FILE, output_dir=OUT)"'


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    tool: str
    suffix: str  # of its file, after the prefix that the user gave
    text: str
    command: str  # what to type, with FILE for the recipe's file


def write_recipes(model_type: str, chosen: Parameters) -> tuple[WrittenRecipe, ...]:
    """The recipes for a model of this type; llama-quantize's only if the layout of its GGUF files is known."""
    recipes = [llm_compressor_recipe(chosen)]
    if model_type != "mixtral":  # whose files have other names than its parameters
        recipes.append(exllamav3_recipe(chosen))
    architecture = next((name for name, types in LAYOUTS.items() if model_type in types), None)
    if architecture is not None:
        recipes.append(llama_quantize_recipe(architecture, chosen))
    return tuple(recipes)


def _matrices(chosen: Parameters) -> list[StoredWeight]:
    """What tools quantize: everything with more than one axis but routers of experts."""
    return [weight for weight in chosen.values() if len(weight.shape) > 1 and not ROUTER.search(weight.name)]


# ── llm-compressor ────────────────────────────────────────────────────────────────────────────────────────────────────
def llm_compressor_recipe(chosen: Parameters) -> WrittenRecipe:
    """The recipe; matrices that keep their numbers and, as usual, the embedding are not targets."""
    groups: dict[str, list[str]] = {}
    ignored_modules = [name.removesuffix(".weight") for name in chosen if ROUTER.search(name)]
    for weight in _matrices(chosen):
        if not EMBEDDING.search(weight.name):
            how = arguments_of(weight)
            (ignored_modules if how is None else groups.setdefault(json.dumps(how), [])).extend(modules_of(weight))
    numbered = {
        f"group_{number}": {"weights": json.loads(weights), "targets": patterns(modules)}
        for number, (weights, modules) in enumerate(groups.items())
    }
    modifier = {"QuantizationModifier": {"ignore": patterns(ignored_modules), "config_groups": numbered}}
    text = json.dumps({"quant_stage": {"quant_modifiers": modifier}}, indent=2) + "\n"  # JSON is YAML, too
    return WrittenRecipe("llm-compressor", LLM_COMPRESSOR, text, ONESHOT)


def modules_of(weight: StoredWeight) -> tuple[str, ...]:
    """The modules that a matrix consists of in files, where the experts of a layer are stored one by one: ``*``.

    >>> modules_of(StoredWeight("model.layers.0.mlp.experts.gate_up_proj", (8, 4, 2), 16, "bfloat16"))
    ('model.layers.0.mlp.experts.*.gate_proj', 'model.layers.0.mlp.experts.*.up_proj')
    """
    module, _, leaf = weight.name.rpartition(".")
    if len(weight.shape) != 3 or leaf not in EXPERTS:
        return (weight.name.removesuffix(".weight"),)
    return tuple(f"{module}.*.{piece}" for piece in EXPERTS[leaf])


def arguments_of(weight: StoredWeight) -> dict[str, int | str] | None:
    """The arguments of compressed-tensors for weights of this format; None if they stay 16 bits or more.

    >>> arguments_of(StoredWeight("w", (4, 64), 4.5, "rtn 4 bit g32"))["group_size"]
    32
    """
    float_arguments = next((how for name, how in FLOATS.items() if weight.format.startswith(name)), None)
    if float_arguments is not None:
        return {"type": "float", "symmetric": True, **float_arguments}
    match, group = INTEGERS.search(weight.format), GROUP.search(weight.format)
    if match:
        bits, size = int(match[1] or match[2]), int(group[1]) if group else None
    else:  # of GGUF files: the nearest integers, and floats of 16 bits and more
        bits, size = math.floor(weight.bits), NEAREST_GROUP
        bits = min(max(bits, 2), 8) if bits < 16 else bits
    if bits >= 16:
        return None
    is_symmetric = bool(match) and not weight.format.startswith("AWQ") and " asym" not in weight.format
    how: dict[str, int | str] = {"num_bits": bits, "type": "int", "symmetric": is_symmetric}
    return {**how, "strategy": "channel"} if size is None else {**how, "strategy": "group", "group_size": size}


def patterns(modules: Iterable[str]) -> list[str]:
    """Module names as targets of llm-compressor: a regular expression for all experts of a layer.

    >>> patterns(["lm_head", "layers.0.mlp.experts.*.up_proj"])
    ['lm_head', 're:layers\\\\.0\\\\.mlp\\\\.experts\\\\.\\\\d+\\\\.up_proj$']
    """
    escaped = ((name, re.escape(name).replace(r"\*", r"\d+")) for name in modules)
    return [f"re:{expression}$" if "*" in name else name for name, expression in escaped]


# ── llama-quantize ────────────────────────────────────────────────────────────────────────────────────────────────────
PLAIN_TYPES = {"float64": "F32", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NEAREST = ("Q2_K", "Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0", "F16")  # for formats that are no types of GGUF files
QUANTIZE = "llama-quantize --tensor-type-file FILE model-f32.gguf model-mixed.gguf Q8_0"  # all matrices are in the file


def llama_quantize_recipe(architecture: str, chosen: Parameters) -> WrittenRecipe:
    """The recipe for a model of this architecture of GGUF files."""
    matrices = {weight.name: weight for weight in _matrices(chosen)}
    names = names_in_files(architecture, layers_of_text(chosen) or 0, iter(matrices))
    types = {
        name: type_of(weight)
        for parameter, weight in matrices.items()
        for name in names.get(parameter, ())
        if "ffn_gate_inp" not in name  # routers: never quantized by llama-quantize
    }
    text = "".join(f"^{re.escape(name)}$={kind.lower()}\n" for name, kind in types.items())
    return WrittenRecipe("llama-quantize", ".llama-quantize.txt", text, QUANTIZE)


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


# ── ExLlamaV3 ─────────────────────────────────────────────────────────────────────────────────────────────────────────
CONVERSIONS = """\
# Convert the model once for each number of bits first, at most 8, the head too:
# python convert.py -i MODEL -o model-exl3-{most}bpw -w WORK -b {most} -hb {most}
"""
RECOMPILE = "python util/recompile.py -i model-exl3-{most}bpw -o model-exl3-mixed -or FILE"


def exllamav3_recipe(chosen: Parameters) -> WrittenRecipe:
    """The recipe; what keeps 16 bits gets 8, the most of EXL3."""
    bits = {
        f"{module}.*": _whole_bits(weight)
        for weight in _matrices(chosen)
        if not EMBEDDING.search(weight.name)
        for module in modules_of(weight)
    }
    most = Counter(bits.values()).most_common(1)[0][0]
    others = {key: bpw for key, bpw in bits.items() if bpw != most}
    sources = [{"id": f"{bpw}bpw", "model_dir": f"model-exl3-{bpw}bpw"} for bpw in sorted(set(others.values()))]
    overrides = [{"key": key, "source": f"{bpw}bpw"} for key, bpw in others.items()]
    text = CONVERSIONS.format(most=most) + json.dumps({"sources": sources, "overrides": overrides}, indent=2) + "\n"
    return WrittenRecipe("ExLlamaV3", ".exllamav3.yaml", text, RECOMPILE.format(most=most))


def _whole_bits(weight: StoredWeight) -> int:
    """The bits of a conversion by ExLlamaV3 that are not less than those of a format."""
    how = arguments_of(weight)
    return 8 if how is None else min(8, int(how["num_bits"]))
