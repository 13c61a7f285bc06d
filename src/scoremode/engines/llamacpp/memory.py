"""How much memory llama.cpp takes beside the weights of a GGUF file, estimated from its header."""

from __future__ import annotations

from scoremode.core.models.gguf import GgufFacts, gguf_constants
from scoremode.engines.llamacpp.llamacpp_options import Choices


def cache_bytes(facts: GgufFacts, choices: Choices, tokens: int) -> int:
    """The bytes of the keys and values of so many tokens, about."""
    types, sizes = gguf_constants().GGMLQuantizationType, gguf_constants().GGML_QUANT_SIZES
    width, layers = facts.number("embedding_length") or 0, facts.number("block_count") or 0
    heads = facts.number("attention.head_count") or 1
    shared = facts.number("attention.head_count_kv") or heads
    found = 0
    for key, kind in (("key", choices.cache_type_k), ("value", choices.cache_type_v)):
        count, size = sizes[types[kind.upper()]]  # numbers and bytes of a block
        found += layers * tokens * shared * (facts.number(f"attention.{key}_length") or width // heads) * size // count
    return found


def memory_of(facts: GgufFacts, vocabulary: int, choices: Choices, longest: int) -> int:
    """The bytes of the logits of a decode, of keys and values, and of the largest intermediate results, about."""
    width, heads = facts.number("embedding_length") or 0, facts.number("attention.head_count") or 1
    logits = min(longest, choices.n_batch) * vocabulary * 4
    together = min(longest, choices.n_ubatch)
    inner = facts.number("feed_forward_length") or 4 * width
    attention = 0 if choices.flash_attn == "on" else heads * longest
    cache = cache_bytes(facts, choices, longest)
    return logits + cache + together * (attention + 2 * inner + 4 * width) * 4
