"""The options of the Transformers engine."""

from __future__ import annotations

from dataclasses import dataclass

from scoremode.engines.options import CheckpointOptions, option


@dataclass(frozen=True, slots=True)
class TransformersOptions(CheckpointOptions):
    """The options of the Transformers engine."""

    device: str | None = option("cpu, cuda, cuda:N, or auto for several GPUs")
    batch_tokens: int | None = option("tokens in one forward pass", metavar="N")
    attn_implementation: str | None = option(
        "attention code of Transformers: eager, sdpa, flash_attention_2, … (default: its own choice)", metavar="NAME"
    )
    adapter: str | None = option(
        "folder of a PEFT adapter to put on the model", metavar="FOLDER", in_identity=False, may_vary=False
    )
