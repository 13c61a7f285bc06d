"""The options of the llama.cpp engine, under llama.cpp's own names, and their defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scoremode.core.engine.options import Options, option
from scoremode.errors import OptionError

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MOST_THREADS = 512  # GGML_MAX_N_THREADS
MOST = 2**31 - 1  # llama.cpp counts in 32 bits
FLASH_ATTENTION = {"off": 0, "on": 1, "auto": -1}


@dataclass(frozen=True, slots=True)
class LlamaCppOptions(Options):
    """The options of the llama.cpp engine. The defaults are llama.cpp's own, except for flash attention."""

    threads: int | None = option(
        "threads of llama.cpp (default: all cores)", metavar="N", above=0, at_most=MOST_THREADS
    )
    n_gpu_layers: int | None = option("layers on a GPU (default: all that fit)", metavar="N", above=-2, at_most=MOST)
    n_batch: int | None = option("most tokens in one decode (default: 2048)", metavar="N", above=0, at_most=MOST)
    n_ubatch: int | None = option(
        "most tokens that are computed at once (default: 512)", metavar="N", above=0, at_most=MOST
    )
    cache_type_k: str | None = option("type of the cache of keys (default: f16)", choices=CACHE_TYPES, cache_part="k")
    cache_type_v: str | None = option("type of the cache of values (default: f16)", choices=CACHE_TYPES, cache_part="v")
    divergence: str | None = option(
        "columns of a comparison: always all of them", choices=("all",), in_identity=False, may_vary=False
    )
    flash_attn: str | None = option(
        "flash attention (default: off, because logits depend on the length of the batch with it)",
        choices=tuple(FLASH_ATTENTION),
    )


@dataclass(frozen=True, slots=True)
class LlamaCppParameters:
    """The parameters that are passed to llama.cpp. They are part of every run's identity."""

    n_batch: int
    n_ubatch: int
    cache_type_k: str
    cache_type_v: str
    flash_attn: str
    n_gpu_layers: int | None

    @staticmethod
    def of(options: LlamaCppOptions) -> LlamaCppParameters:
        n_batch = options.n_batch or 2048
        n_ubatch = min(options.n_ubatch or 512, n_batch)
        if options.n_ubatch is not None and options.n_ubatch > n_batch:
            raise OptionError(
                f"--n-ubatch {options.n_ubatch} is larger than --n-batch {n_batch}", fix=f"give {n_batch} or less"
            )
        keys, values = options.cache_type_k or "f16", options.cache_type_v or "f16"
        flash = options.flash_attn or "off"
        if flash == "off" and values not in ("f32", "f16", "bf16"):
            raise OptionError(
                f"--cache-type-v {values} works in llama.cpp only with flash attention", fix="add --flash-attn on"
            )
        return LlamaCppParameters(n_batch, n_ubatch, keys, values, flash, options.n_gpu_layers)

    def settings(self) -> dict[str, Any]:
        """Returns the parameters that may change a score, under llama.cpp's names."""
        return {name: value for name, value in asdict(self).items() if value is not None}
