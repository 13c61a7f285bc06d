"""The options of the llama.cpp engine, by the names that llama.cpp has for them."""

from __future__ import annotations

from dataclasses import dataclass

from scoremode.engines.options import Options, option

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MOST_THREADS = 512  # GGML_MAX_N_THREADS
MOST = 2**31 - 1  # llama.cpp counts in 32 bits
FLASH_ATTENTION = {"off": 0, "on": 1, "auto": -1}


@dataclass(frozen=True, slots=True)
class LlamaCppOptions(Options):
    """The options of the llama.cpp engine. What is not given is llama.cpp's own default, but for flash attention."""

    threads: int | None = option(
        "threads of llama.cpp (default: all cores)", metavar="N", above=0, at_most=MOST_THREADS
    )
    n_gpu_layers: int | None = option("layers on a GPU (default: all that fit)", metavar="N", above=-2, at_most=MOST)
    n_batch: int | None = option("most tokens in one decode (default: 2048)", metavar="N", above=0, at_most=MOST)
    n_ubatch: int | None = option(
        "most tokens that are computed at once (default: 512)", metavar="N", above=0, at_most=MOST
    )
    cache_type_k: str | None = option("type of the cache of keys (default: f16)", choices=CACHE_TYPES)
    cache_type_v: str | None = option("type of the cache of values (default: f16)", choices=CACHE_TYPES)
    flash_attn: str | None = option(
        "flash attention (default: off, because logits depend on the length of the batch with it)",
        choices=tuple(FLASH_ATTENTION),
    )
