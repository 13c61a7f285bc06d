"""The options of the engine, and what a config declares as MLX writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.core.engine.options import DTYPE_ALIASES, DTYPES, CheckpointOptions, option
from scoremode.core.plan.path import DECODE

CACHE_BITS = {"int8": 8, "int4": 4, "int2": 2}  # bits per element of a quantized K/V cache
GROUP = 64  # values of a cache that share a scale; mlx-lm's default


@dataclass(frozen=True, slots=True)
class MlxOptions(CheckpointOptions):
    dtype: str | None = option(
        "float32, bfloat16, float16 or auto (default: auto, as the checkpoint stores it)",
        choices=("auto", *DTYPES),
        aliases=DTYPE_ALIASES,
    )
    device: str | None = option("cpu or gpu (default: MLX's own choice)")
    prefill_step_size: int | None = option(
        "most tokens in one pass of a prefill (default: a window is one pass)", metavar="N", above=0
    )
    kv_cache_dtype: str | None = option(
        "type of the K/V cache, with --path decode (default: auto, the model's dtype)",
        choices=("auto", *CACHE_BITS),
        metavar="DTYPE",
        path=DECODE,
        cache_part="kv",
    )
    kv_group_size: int | None = option(
        "values of a quantized K/V cache that share a scale: 32, 64 or 128 (default: 64)", metavar="N", path=DECODE
    )
    quantized_kv_start: int | None = option(
        "tokens after which the K/V cache is quantized (default: 0; mlx-lm's command line has 5000)",
        metavar="N",
        above=-1,
        path=DECODE,
    )


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization that a config declares as MLX writes it; None if it declares none, or one of another kind.

    >>> quantization_of({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}})["bits"]
    4
    >>> quantization_of({"quantization_config": {"bits": 4, "group_size": 128}}) is None  # mlx-lm does not read it
    True
    """
    scheme = config.get("quantization")
    if not isinstance(scheme, Mapping) or "quant_method" in scheme:
        return None
    return scheme if type(scheme.get("bits")) is int and type(scheme.get("group_size")) is int else None


def format_words(quantization: Mapping[str, Any]) -> str:
    """How the weights of an MLX checkpoint are declared, in a few words.

    >>> format_words({"group_size": 32, "bits": 4, "mode": "mxfp4"})
    'MLX mxfp4'
    """
    mode = quantization.get("mode", "affine")
    if mode != "affine":
        return f"MLX {str(mode)[:20]}"
    layers = [layer for layer in quantization.values() if isinstance(layer, Mapping)]
    is_mixed = any(layer.get("bits", quantization["bits"]) != quantization["bits"] for layer in layers)
    return (
        f"MLX {'mixed, mostly ' if is_mixed else ''}{quantization['bits']} bit, groups of {quantization['group_size']}"
    )
