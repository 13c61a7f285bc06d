"""The options of the ExLlamaV3 engine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from scoremode.engines.options import Options, option


@dataclass(frozen=True, slots=True)
class ExllamaOptions(Options):
    """The options of the ExLlamaV3 engine."""

    device: str | None = option("GPU, as in cuda:0 (default: all that are visible, filled one after the other)")
    tensor_p: bool | None = option("ExLlamaV3's own tensor parallelism over all visible GPUs")
    trust_remote_code: bool | None = option(
        "execute Python code shipped with the tokenizer; off unless given", may_vary=False
    )
    revision: str | None = option(
        "branch, tag or commit of a model on the hub (default: main)", in_identity=False, may_vary=False
    )
    token: str | None = option(
        "access token for the hub (default: the one that huggingface_hub knows)", in_identity=False, may_vary=False
    )


def kernel_switches() -> dict[str, str]:
    """Environment variables by which ExLlamaV3 chooses its kernels: a part of every run's identity."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("EXL3_", "EXLLAMA"))}
