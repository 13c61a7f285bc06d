"""A mixture of precisions in the words of the tools that can make it: llm-compressor, llama-quantize, ExLlamaV3.

llm-compressor   one group of its QuantizationModifier per precision, and an ignore list
llama-quantize   a list of tensor types (--tensor-type-file), one regular expression per line
ExLlamaV3        its converter takes one mean for a model, so whole conversions are mixed: util/recompile.py copies one
                 of them and takes some tensors from others, as a file in YAML says
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
from scoremode.studies.attribution.weight_formats.matching import EXPERTS, FUSED, OTHER_FOLDERS
from scoremode.studies.attribution.weight_formats.stored import ROUTER, StoredWeight

FLOATS = {"float64": 64, "float32": 32, "F32": 32, "float16": 16, "bfloat16": 16, "F16": 16, "BF16": 16}
INTEGERS = re.compile(r"(?:rtn |GPTQ |AWQ )(\d+) bit|W(\d+)A(\d+)")
GROUP = re.compile(r"\bg(\d+)\b")
BLOCK = re.compile(r"blocks (\d+)×(\d+)")
GGUF_BITS = re.compile(r"I?Q(\d)_")
EXL3_BITS = re.compile(r"EXL3 ([\d.]+) bit$")
BLOCKS = 32  # weights that share a scale in most GGUF types


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
    notes: tuple[str, ...]  # what the tool cannot do exactly as it was measured


@dataclass(frozen=True, slots=True)
class Precision:
    """A format in words that tools share."""

    bits: int  # of one number, without its scale; 16 and more: kept as it is
    group: int | None = None  # weights that share a scale; None: a whole row
    is_float: bool = False
    is_symmetric: bool = True
    activation_bits: int = 16
    kind: str = ""  # NVFP4 or MXFP4
    blocks: tuple[int, int] | None = None  # rows and columns that share a scale

    @property
    def is_kept(self) -> bool:
        return self.bits >= 16


def modules_of(weight: StoredWeight, *, is_mixtral: bool = False) -> tuple[str, ...]:
    """The modules that a matrix consists of in files, where the experts of a layer are stored one by one: ``*``.

    The files of Mixtral have names of their own for them.

    >>> modules_of(StoredWeight("model.layers.0.mlp.experts.gate_up_proj", (8, 4, 2), 16, "bfloat16"))
    ('model.layers.0.mlp.experts.*.gate_proj', 'model.layers.0.mlp.experts.*.up_proj')
    """
    module, _, leaf = weight.name.rpartition(".")
    if len(weight.shape) != 3 or f"experts.{leaf}" not in EXPERTS:
        return (weight.name.removesuffix(".weight"),)
    pieces = EXPERTS[f"experts.{leaf}"][is_mixtral]
    return tuple(f"{module.replace(*OTHER_FOLDERS[0]) if is_mixtral else module}.*.{piece}" for piece in pieces)


def precision_of(weight: StoredWeight) -> tuple[Precision, bool]:
    """The precision of a stored weight, and whether its format says exactly that. Otherwise its bits decide.

    >>> precision_of(StoredWeight("w", (4, 64), 4.5, "rtn 4 bit g32"))
    (Precision(bits=4, group=32, is_float=False, is_symmetric=True, activation_bits=16, kind='', blocks=None), True)
    """
    name = weight.format
    if name in FLOATS:
        return Precision(FLOATS[name], is_float=True), True
    if name.startswith(("NVFP4", "MXFP4")):
        return Precision(
            4, 16 if name[0] == "N" else 32, True, activation_bits=16 if "A16" in name else 4, kind=name[:5]
        ), True
    if name.startswith("FP8"):
        block = BLOCK.search(name)
        blocks = (int(block[1]), int(block[2])) if block else None
        return Precision(8, is_float=True, activation_bits=16 if "A16" in name else 8, blocks=blocks), True
    if found := INTEGERS.search(name):
        group = GROUP.search(name)
        is_symmetric = not (name.startswith("AWQ") or " asym" in name)
        activations = int(found[3]) if found[3] else 16
        size = int(group[1]) if group else None
        return Precision(int(found[1] or found[2]), size, False, is_symmetric, activations), True
    named = GGUF_BITS.match(name) or EXL3_BITS.match(name)
    bits = max(2, min(math.ceil(float(named[1])) if named else int(weight.bits), 8))
    return Precision(bits if weight.bits < 16 else 16, BLOCKS, is_symmetric=False), False


def counted(count: int, what: str) -> str:
    """A number with its noun.

    >>> counted(1, "matrix"), counted(2, "matrix")
    ('1 matrix', '2 matrices')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what.removesuffix('x')}ces"


# ── llm-compressor ────────────────────────────────────────────────────────────────────────────────────────────────────
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
ONESHOT = 'python -c "from llmcompressor import oneshot; oneshot(model=MODEL, recipe=FILE, output_dir=OUT)"'
FOUR_BIT_FLOATS: dict[str, dict[str, Any]] = {
    "NVFP4": {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    "MXFP4": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}


def llm_compressor_recipe(mixture: Mixture) -> WrittenRecipe:
    """The recipe; matrices that keep their numbers and, as usual, the embedding are not targets."""
    groups: dict[Precision, list[str]] = {}
    kept: list[str] = []
    near = embeddings = 0
    for weight in mixture.matrices:
        precision, is_exact = precision_of(weight)
        if EMBEDDING.search(weight.name):
            embeddings += not precision.is_kept
            continue
        near += not is_exact
        (kept if precision.is_kept else groups.setdefault(precision, [])).extend(modules_of(weight))
    kept += [w.name.removesuffix(".weight") for w in mixture.parameters.values() if ROUTER.search(w.name)]
    notes = []
    if near:
        notes.append(f"{counted(near, 'matrix')} of GGUF types or EXL3 become the nearest integers in groups of 32")
    if embeddings:
        notes.append("the embedding is not a target of llm-compressor's recipe and stays as it is")
    if any(precision.kind == "NVFP4" and precision.activation_bits < 16 for precision in groups):
        notes.append("NVFP4 with activations needs calibration data: give oneshot a dataset")
    if mixed := _mixed(groups):
        notes.append(f"{mixed}: servers that fuse them refuse this, and llm-compressor does for NVFP4; use --by layer")
    return WrittenRecipe("llm-compressor", ".llm-compressor.yaml", _yaml(groups, kept), ONESHOT, tuple(notes))


def _mixed(groups: Mapping[Precision, Iterable[str]]) -> str:
    """Which matrices that servers fuse have different precisions, in words; nothing if none have."""
    found: dict[str, set[Precision]] = {}
    for precision, modules in groups.items():
        for module in modules:
            stem, _, leaf = module.rpartition(".")
            for fused in (pieces for pieces in FUSED.values() if leaf in pieces):
                found.setdefault(f"{stem}.{'|'.join(fused)}", set()).add(precision)
    mixed = [name for name, precisions in found.items() if len(precisions) > 1]
    return f"{mixed[0]} and {len(mixed) - 1} more have several precisions" if mixed else ""


def _yaml(groups: Mapping[Precision, Iterable[str]], kept: Iterable[str]) -> str:
    lines = ["quant_stage:", "  quant_modifiers:", "    QuantizationModifier:"]
    lines += _listed("ignore", patterns(kept), 6)
    lines.append("      config_groups:" if groups else "      config_groups: {}")
    for number, (precision, modules) in enumerate(sorted(groups.items(), key=lambda item: item[0].bits)):
        lines.append(f"        group_{number}:")
        lines.append(f"          weights: {json.dumps(weights_of(precision))}")
        if inputs := activations_of(precision):
            lines.append(f"          input_activations: {json.dumps(inputs)}")
        lines += _listed("targets", patterns(modules), 10)
    return "\n".join(lines) + "\n"


def _listed(name: str, entries: Iterable[str], indent: int) -> list[str]:
    found = [f"{' ' * indent}  - {json.dumps(entry)}" for entry in entries]
    return [f"{' ' * indent}{name}:", *found] if found else [f"{' ' * indent}{name}: []"]


def weights_of(precision: Precision) -> dict[str, Any]:
    """The arguments of compressed-tensors for the weights of a group."""
    kind = {"num_bits": precision.bits, "type": "float" if precision.is_float else "int"}
    common = {**kind, "symmetric": precision.is_symmetric, "dynamic": False}
    if precision.kind:
        return {**common, **FOUR_BIT_FLOATS[precision.kind]}
    if precision.blocks is not None:
        return {**common, "strategy": "block", "block_structure": list(precision.blocks)}
    if precision.group is None:
        return {**common, "strategy": "channel"}
    return {**common, "strategy": "group", "group_size": precision.group}


def activations_of(precision: Precision) -> dict[str, Any] | None:
    """The arguments of compressed-tensors for the activations of a group; None if they are not rounded."""
    if precision.activation_bits >= 16:
        return None
    kind = {"num_bits": precision.activation_bits, "type": "float" if precision.is_float else "int", "symmetric": True}
    if precision.kind == "NVFP4":  # a scale of each matrix from calibration, and one per group when it is computed
        return {**kind, **FOUR_BIT_FLOATS["NVFP4"], "dynamic": "local", "observer": "static_minmax"}
    if precision.kind:
        return {**kind, **FOUR_BIT_FLOATS[precision.kind], "dynamic": True}
    if precision.blocks is not None:  # as many scales as the weights have along their input
        return {**kind, "strategy": "group", "group_size": precision.blocks[1], "dynamic": True}
    return {**kind, "strategy": "token", "dynamic": True}


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
            near += chosen[name] != PLAIN_TYPES.get(weight.format, weight.format)
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

    kind = PLAIN_TYPES.get(weight.format, weight.format)
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


# ── ExLlamaV3 ─────────────────────────────────────────────────────────────────────────────────────────────────────────
LEAST, MOST = 1, 8  # bits per weight
CONVERSIONS = """\
# python util/recompile.py -i model-exl3-{most}bpw -o model-exl3-mixed -or FILE
# Convert the model once for each number of bits first, the head too:
# python convert.py -i MODEL -o model-exl3-{most}bpw -w WORK -b {most} -hb {most}
"""
RECOMPILE = "python util/recompile.py -i model-exl3-{most}bpw -o model-exl3-mixed -or FILE"


def exllamav3_recipe(mixture: Mixture) -> WrittenRecipe | None:
    """The recipe; None if there is nothing that ExLlamaV3 would quantize."""
    bits: dict[str, int] = {}
    kept = near = 0  # what EXL3 rounds in another way than it was measured
    for weight in mixture.matrices:
        if EMBEDDING.search(weight.name):
            continue
        precision, _ = precision_of(weight)
        own = EXL3_BITS.match(weight.format)
        needed = math.ceil(float(own[1])) if own else precision.bits
        kept += precision.is_kept
        near += not precision.is_kept and (own is None or float(own[1]) != needed)
        modules = modules_of(weight, is_mixtral=mixture.model_type == "mixtral")
        bits |= {f"{module}.*": max(LEAST, min(MOST, needed)) for module in modules}
    if not bits:
        return None
    most = Counter(bits.values()).most_common(1)[0][0]
    others = {key: own for key, own in bits.items() if own != most}
    lines = [CONVERSIONS.format(most=most).rstrip("\n")]
    lines.append("sources:" if others else "sources: []")
    lines += [f'  - {{id: "{own}bpw", model_dir: "model-exl3-{own}bpw"}}' for own in sorted(set(others.values()))]
    lines.append("overrides:" if others else "overrides: []")
    lines += [f'  - {{key: {json.dumps(key)}, source: "{own}bpw"}}' for key, own in others.items()]
    notes = ["the conversions for it need a GPU, once for each number of bits"]
    if kept:
        notes.append(f"{counted(kept, 'matrix')} that the mixture keeps as they are get 8 bits, the most of EXL3")
    if near:
        notes.append(f"{counted(near, 'matrix')} get as many bits in EXL3, which rounds in its own way")
    command = RECOMPILE.format(most=most)
    return WrittenRecipe("ExLlamaV3", ".exllamav3.yaml", "\n".join(lines) + "\n", command, tuple(notes))


def write_recipes(mixture: Mixture) -> list[WrittenRecipe]:
    found = [llm_compressor_recipe(mixture), llama_quantize_recipe(mixture), exllamav3_recipe(mixture)]
    return [recipe for recipe in found if recipe is not None]
