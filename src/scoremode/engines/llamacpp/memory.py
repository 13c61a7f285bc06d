"""How much memory llama.cpp takes beside the weights of a GGUF file, estimated from its header."""

from __future__ import annotations

from scoremode.engines.llamacpp.llamacpp_options import Choices
from scoremode.models.gguf import GgufFacts


def memory_of(facts: GgufFacts, vocabulary: int, choices: Choices, longest: int) -> int:
    """The bytes of the logits of a decode, of keys and values, and of the largest intermediate results, about."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    width, layers = facts.number("embedding_length") or 0, facts.number("block_count") or 0
    heads = facts.number("attention.head_count") or 1
    shared = facts.number("attention.head_count_kv") or heads
    values = layers * longest * shared * (width // heads)  # as many keys
    blocks = (
        GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]] for kind in (choices.cache_type_k, choices.cache_type_v)
    )
    cache: int = sum(values * size // of for of, size in blocks)
    logits = min(longest, choices.n_batch) * vocabulary * 4
    together = min(longest, choices.n_ubatch)
    inner = facts.number("feed_forward_length") or 4 * width
    attention = 0 if choices.flash_attn == "on" else heads * longest
    return logits + cache + together * (attention + 2 * inner + 4 * width) * 4
