"""A mixture as a recipe of llm-compressor: one group of its QuantizationModifier per precision, and an ignore list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from scoremode.core.models.sizes import EMBEDDING
from scoremode.studies.attribution.recipes.mixture import (
    Mixture,
    Precision,
    WrittenRecipe,
    counted,
    modules_of,
    precision_of,
)
from scoremode.studies.attribution.weight_formats.matching import FUSED
from scoremode.studies.attribution.weight_formats.stored import ROUTER

LAYER = re.compile(r"\.(\d+)\.")
COMMAND = 'python -c "from llmcompressor import oneshot; oneshot(model=MODEL, recipe=FILE, output_dir=OUT)"'
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
    return WrittenRecipe("llm-compressor", ".llm-compressor.yaml", _text(groups, kept), COMMAND, tuple(notes))


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


def _text(groups: Mapping[Precision, Iterable[str]], kept: Iterable[str]) -> str:
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
        layer = LAYER.search(module)
        kind = f"{module[: layer.start(1)]}#{module[layer.end(1) :]}" if layer else module
        kinds.setdefault(kind, []).extend([int(layer[1])] if layer else [])
    return [_pattern(kind, layers) for kind, layers in kinds.items()]


def _pattern(kind: str, layers: list[int]) -> str:
    before, found, after = kind.partition("#")
    if not found:
        return kind
    numbers, after = "|".join(map(str, sorted(layers))), re.escape(after).replace(r"\*", r"\d+")
    return f"re:{re.escape(before)}({numbers}){after}$"
