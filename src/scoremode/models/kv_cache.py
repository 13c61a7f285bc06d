"""The size of a model's keys and values, from its config, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "half": 2, "bfloat16": 2},
    **{"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1},
}
"""Bytes of one number, by its type."""


def values_per_token(config: Mapping[str, Any]) -> int | None:
    """Returns how many numbers a K/V cache keeps of one token, in all layers; None if the config does not say it.

    Layers without a cache that grows, such as linear attention, are not counted. Models that compress their keys and
    values (MLA) keep something else, so nothing is said of them.

    >>> values_per_token({"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64})
    11520
    """
    inner = config.get("text_config")
    own = inner if isinstance(inner, Mapping) else config
    kinds = own.get("layer_types")
    layers = _count(own.get("num_hidden_layers"))
    if isinstance(kinds, list) and len(kinds) == layers:
        layers = sum(1 for kind in kinds if str(kind).endswith("attention") and "linear" not in str(kind))
    heads = _count(own.get("num_attention_heads"))
    shared = _count(own.get("num_key_value_heads")) or heads
    width = _count(own.get("head_dim")) or (_count(own.get("hidden_size")) or 0) // (heads or 1)
    if not layers or not shared or not width or own.get("kv_lora_rank") is not None:
        return None
    return 2 * layers * shared * width


def cache_bytes(config: Mapping[str, Any], kind: str, tokens: int) -> int | None:
    """Returns the bytes of the keys and values of so many tokens; None if they are not known."""
    values, size = values_per_token(config), BYTES.get(kind)
    return None if values is None or size is None else values * size * tokens


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 24 else None
