"""The model to score: its name, tokenizer, fingerprint, and whatever else is known before an engine is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scoremode.core.models.facts import ModelFacts, inspect
from scoremode.core.models.sizes import ModelSizes
from scoremode.core.text.tokenizer import HuggingFaceTokenizer, TextTokenizer

LONGEST_FORMAT = 60  # characters; a config may say anything
SAME = (  # facts of a checkpoint that its Subject has under the same names
    *("fingerprint", "vocabulary", "context_length", "hidden_size", "weight_bytes", "bits_per_weight"),
    *("emulated_bytes", "sizes", "revision", "files"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model before an engine opens it. Only the first three fields are required.

    A server may know only its tokenizer; a GGUF file has all of this in its header.
    """

    name: str  # as the user gave it
    tokenizer: TextTokenizer
    fingerprint: str  # equal for equal weights; part of every run's identity
    vocabulary: int | None = None
    context_length: int | None = None
    hidden_size: int | None = None
    dtype: str | None = None  # of the stored weights
    weight_bytes: int | None = None
    bits_per_weight: float | None = None
    emulated_bytes: int | None = None  # the size that an emulated quantization would have
    format: str | None = None  # how the weights are stored, in a few words: GGUF Q4_K_M, compressed-tensors W4A16
    sizes: ModelSizes | None = None  # of the body, the embedding and the head
    revision: str | None = None  # the commit on the hub
    files: Mapping[str, str] = field(default_factory=dict)  # file name -> sha256
    notes: tuple[str, ...] = ()  # what a reader of the results must know about the model's files
    checkpoint: ModelFacts | None = None  # the folder in the Hugging Face layout, if there is one


def checkpoint_subject(model: str, options: Any, tokenizer: str | None) -> Subject:
    """The Subject of a Hugging Face checkpoint: a folder, a name on the hub, or the embedded model. Loads no weight."""
    facts = inspect(model, revision=options.revision, token=options.token)
    folder: str | Path = tokenizer or facts.path
    loaded = HuggingFaceTokenizer.load(folder, trust_remote_code=bool(options.trust_remote_code))
    stored = facts.config.get("dtype") or facts.config.get("torch_dtype")
    dtype = stored if isinstance(stored, str) else None
    notes = (f"not counted as weights: {', '.join(facts.left_out)}",) if facts.left_out else ()
    same: dict[str, Any] = {name: getattr(facts, name) for name in SAME}
    form = format_of(facts.config, dtype)
    return Subject(model, loaded, **same, dtype=dtype, format=form, notes=notes, checkpoint=facts)


# ── how weights are stored, in a few words ───────────────────────────────────────────────────────────────────────────
def format_of(config: Mapping[str, Any], dtype: str | None) -> str:
    """The format of a checkpoint in the Hugging Face layout.

    >>> format_of({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "float16")
    'GPTQ 4 bit'
    >>> format_of({}, "bfloat16")
    'safetensors bfloat16'
    """
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        return _quantized(quantization)[:LONGEST_FORMAT]
    bits, body = config.get("bits_per_weight"), config.get("emulated_bits")
    if isinstance(bits, int | float) and not isinstance(bits, bool):
        is_known = type(body) is int and 0 < body <= 64  # the bits of the numbers in the layers, without their scales
        return f"emulated {body}-bit layers" if is_known else f"emulated {bits:.3g} bit"
    return f"safetensors {dtype or ''}".strip()[:LONGEST_FORMAT]


def _quantized(quantization: Mapping[str, Any]) -> str:
    method, bits = str(quantization.get("quant_method", "quantized")), quantization.get("bits")
    if method == "compressed-tensors":
        return f"{method} {_scheme(quantization)}".strip()
    if method in ("gptq", "awq", "exl3"):
        method = method.upper()
    if not isinstance(bits, int | float) or isinstance(bits, bool):
        return method
    return f"{method} {bits:g} bpw" if method == "EXL3" else f"{method} {bits:g} bit"


def _scheme(quantization: Mapping[str, Any]) -> str:
    """The quantization scheme, such as W4A16, FP8 or NVFP4, if all groups of layers have the same."""
    format_name = str(quantization.get("format", ""))
    for scheme in ("nvfp4", "mxfp4"):
        if scheme in format_name:
            return scheme.upper()
    groups = quantization.get("config_groups")
    schemes = {scheme_of(group) for group in groups.values()} if isinstance(groups, Mapping) else set()
    return schemes.pop() if len(schemes) == 1 else "mixed" if schemes else ""


def scheme_of(group: object) -> str:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        return ""
    inputs = group.get("input_activations")
    bits, input_bits = weights.get("num_bits"), inputs.get("num_bits") if isinstance(inputs, Mapping) else 16
    if weights.get("type") == "float":
        return f"FP{bits}" if input_bits == bits else f"FP{bits} A{input_bits}"
    return f"W{bits}A{input_bits}"
