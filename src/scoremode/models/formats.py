"""What a checkpoint's weights are stored as, in a few words, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST = 60  # characters; a config may say anything


def format_of(config: Mapping[str, Any], dtype: str | None) -> str:
    """The format of a checkpoint in the Hugging Face layout.

    >>> format_of({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "float16")
    'GPTQ 4 bit'
    >>> format_of({}, "bfloat16")
    'safetensors bfloat16'
    """
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        return _quantized(quantization)[:LONGEST]
    bits = config.get("bits_per_weight")
    if isinstance(bits, int | float) and not isinstance(bits, bool):
        return f"emulated {bits:.3g} bit"
    return f"safetensors {dtype or ''}".strip()[:LONGEST]


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
    """W4A16, W8A8, FP8, NVFP4, … if all groups of layers have the same."""
    named = str(quantization.get("format", ""))
    for known in ("nvfp4", "mxfp4"):
        if known in named:
            return known.upper()
    groups = quantization.get("config_groups")
    found = {_scheme_of(group) for group in groups.values()} if isinstance(groups, Mapping) else set()
    return found.pop() if len(found) == 1 else "mixed" if found else ""


def _scheme_of(group: object) -> str:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        return ""
    inputs = group.get("input_activations")
    bits, given = weights.get("num_bits"), inputs.get("num_bits") if isinstance(inputs, Mapping) else 16
    if weights.get("type") == "float":
        return f"FP{bits}" if given == bits else f"FP{bits} A{given}"
    return f"W{bits}A{given}"
