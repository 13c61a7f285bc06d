"""How llama.cpp lays out each architecture in a GGUF file, compared with Transformers. Read in its converters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scoremode.errors import ModelError


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
    """The layout of an architecture; ModelError if it is not known, or not that of the baseline."""
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
