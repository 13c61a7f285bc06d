"""Caches of keys and values on the decode path: as the model computes them, or quantized by Transformers with HQQ.

Transformers quantizes what the prefill leaves in the cache at once, and later tokens 128 at a time. Until then it keeps
the newest tokens as they are:

tokens of a window     0 │ 1 … 128 │ 129 … 256 │ 257 … 300        one token was prefilled
read by row 300        quantized               │ as computed
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from scoremode.core.models.facts import ModelFacts
from scoremode.engines.transformers.choices import CACHE_BITS, TransformersOptions, require_cache_library
from scoremode.errors import ModelError

RESIDUAL = 128  # tokens; Transformers' default
GROUP = 64  # values that share a scale; Transformers' default


@dataclass(frozen=True, slots=True)
class CacheKind:
    config: Any  # of the model
    name: str | None  # int8, int4 or int2; None: keys and values as the model computes them

    @staticmethod
    def of(config: Any, options: TransformersOptions) -> CacheKind:
        """Returns the kind that options ask for; ModelError if Transformers cannot quantize the cache of the model."""
        if options.kv_cache_dtype not in CACHE_BITS:
            return CacheKind(config, None)
        require_cache_library(options)
        kind = CacheKind(config, options.kv_cache_dtype)
        try:
            kind.empty()
        except (ValueError, AttributeError) as error:  # sliding windows; no heads
            reason = str(error).strip().split("\n")[0][:160]
            raise ModelError(
                f"Transformers cannot quantize the K/V cache of this model ({reason})", fix="leave --kv-cache-dtype out"
            ) from None
        return kind

    def empty(self) -> Any:
        from transformers import QuantizedCache

        if self.name is None:
            return self.empty_unquantized()
        # with axis 1, a group lies in one head of one token: no window shares a scale with the windows beside it
        group, axis = group_size(self.config, CACHE_BITS[self.name]), {"axis_key": 1, "axis_value": 1}
        details = {"q_group_size": group, "residual_length": RESIDUAL, **axis}
        return QuantizedCache("hqq", self.config, nbits=CACHE_BITS[self.name], **details)

    def empty_unquantized(self) -> Any:
        """Returns an empty cache that keeps keys and values as the model computes them."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def settings(self) -> dict[str, Any]:
        """Returns the settings of a quantized cache that may change a score."""
        if self.name is None:
            return {}
        group = group_size(self.config, CACHE_BITS[self.name])
        settings = {"kv_cache_dtype": self.name, "kv_cache_group": group, "kv_cache_residual": RESIDUAL}
        return {**settings, "hqq": version("hqq")}

    def note(self, longest: int, prefilled: int) -> str | None:
        """Returns a note if windows of at most ``longest`` tokens end before a decoded token is quantized and read."""
        if self.name is None or longest > prefilled + RESIDUAL:
            return None
        first = "the first token was" if prefilled == 1 else f"the first {prefilled} tokens were"
        return (
            f"the {self.name} cache is hardly measured: Transformers keeps up to {RESIDUAL} of the newest tokens "
            f"unquantized, so in windows of up to {longest} tokens only {first} quantized; use longer windows"
        )


def require_quantizable(facts: ModelFacts, options: TransformersOptions) -> None:
    """Refuse a checkpoint whose cache cannot be quantized as the options ask, before its weights are loaded."""
    from transformers import AutoConfig

    if options.kv_cache_dtype in CACHE_BITS:
        trusted = bool(options.trust_remote_code)
        CacheKind.of(AutoConfig.from_pretrained(str(facts.path), trust_remote_code=trusted), options)


def group_size(config: Any, bits: int) -> int:
    """Returns the number of values that share a scale: 64, or less if the heads of the model do not allow that.

    A group must lie in one head. HQQ packs 8 / bits groups into one, so the groups of a token must be a multiple of it.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = math.gcd(GROUP, width)
    while size > 1 and heads * (width // size) % (8 // bits):
        size //= 2
    return size
