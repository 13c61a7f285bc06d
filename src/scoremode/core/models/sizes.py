"""How large a model is on disk, by one definition for every format; and how large its keys and values are.

Bits per weight are the bits of all stored tensors divided by the number of weights they stand for: embeddings, head and
norms included. Scales and zero points add bits and no weights. A matrix that is used twice but stored once counts once.
The embedding and the head are listed apart, because formats treat them differently and small models mostly consist of
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings?|token_embd)\.")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.|^output\.")
PARTS = ("body", "embedding", "head")


@dataclass(frozen=True, slots=True)
class SizedPart:
    """The size of some tensors of a model."""

    bytes: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The size of a model and of its parts.

    >>> sizes = ModelSizes({"body": SizedPart(500, 1000), "embedding": SizedPart(2000, 1000)})
    >>> sizes.bits_per_weight
    10.0
    """

    parts: Mapping[str, SizedPart]  # body, embedding and head; a tied head is stored once, as the embedding

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts.values())

    @property
    def weights(self) -> int:
        return sum(part.weights for part in self.parts.values())

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.bytes / self.weights if self.weights else None

    def as_json(self) -> dict[str, Any]:
        return {name: {"bytes": part.bytes, "weights": part.weights} for name, part in self.parts.items()}


def part_of(tensor: str) -> str:
    """Which part of a model a tensor belongs to, by its name.

    >>> part_of("model.embed_tokens.weight"), part_of("output.weight"), part_of("blk.0.attn_output.weight")
    ('embedding', 'head', 'body')
    """
    if HEAD.search(tensor):
        return "head"
    return "embedding" if EMBEDDING.search(tensor) else "body"


def add_up(tensors: Iterable[tuple[str, int, int]]) -> ModelSizes:
    """The sizes of a model from (name, stored bytes, weights) of each tensor."""
    totals: dict[str, tuple[int, int]] = {}
    for name, stored, weights in tensors:
        part = part_of(name)
        before = totals.get(part, (0, 0))
        totals[part] = before[0] + stored, before[1] + weights
    return ModelSizes({part: SizedPart(*totals[part]) for part in PARTS if part in totals and totals[part][1]})


# ── keys and values, from a config that anybody may have written ─────────────────────────────────────────────────────
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
    text_config = inner if isinstance(inner, Mapping) else config
    kinds = text_config.get("layer_types")
    layers = _count(text_config.get("num_hidden_layers"))
    if isinstance(kinds, list) and len(kinds) == layers:
        layers = sum(1 for kind in kinds if str(kind).endswith("attention") and "linear" not in str(kind))
    heads = _count(text_config.get("num_attention_heads"))
    shared = _count(text_config.get("num_key_value_heads")) or heads
    width = _count(text_config.get("head_dim")) or (_count(text_config.get("hidden_size")) or 0) // (heads or 1)
    if not layers or not shared or not width or text_config.get("kv_lora_rank") is not None:
        return None
    return 2 * layers * shared * width


def cache_bytes(config: Mapping[str, Any], kind: str, tokens: int) -> int | None:
    """Returns the bytes of the keys and values of so many tokens; None if they are not known."""
    values, size = values_per_token(config), BYTES.get(kind)
    return None if values is None or size is None else values * size * tokens


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 24 else None
