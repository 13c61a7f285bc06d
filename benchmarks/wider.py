"""The same Llama with wider layers: what ExLlamaV3 needs to run a small real model.

    python benchmarks/wider.py smollm2-135m runs/models/smollm2-768

ExLlamaV3 wants hidden sizes that are multiples of 128; SmolLM2 has 576. Zeros are added to every matrix, heads whose
output is zero to attention, and the norms are rescaled, because they average over more numbers now. So the new model
gives the logits of the old one, up to rounding.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoremode.core.models.facts import resolve

BLOCK = 128


def padded(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix in the upper left corner of a larger one of zeros."""
    wide = torch.zeros(rows, columns, dtype=weight.dtype)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    return wide


def up(size: int, block: int = BLOCK) -> int:
    return -(-size // block) * block


def widen(model: Any) -> Any:
    """A model with wider layers and the same logits."""
    from transformers import LlamaForCausalLM

    config = model.config
    heads, kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    group = heads // kv
    new_kv = up(kv, BLOCK // math.gcd(BLOCK, size))
    hidden = up(config.hidden_size, math.lcm(BLOCK, new_kv * group))  # Transformers wants a multiple of the heads
    shrink = config.hidden_size / hidden
    wide = type(config)(
        **{
            **config.to_dict(),
            "hidden_size": hidden,
            "intermediate_size": up(config.intermediate_size),
            "num_attention_heads": new_kv * group,
            "num_key_value_heads": new_kv,
            "rms_norm_eps": config.rms_norm_eps * shrink,
            "tie_word_embeddings": False,
        }
    )
    made = LlamaForCausalLM(wide)
    old = model.state_dict()
    old.setdefault("lm_head.weight", old["model.embed_tokens.weight"])
    state = {}
    for name, target in made.state_dict().items():
        weight = old[name]
        if weight.ndim == 1:  # a norm: the mean square is smaller by the added zeros
            state[name] = padded(weight[None] * math.sqrt(shrink), 1, hidden)[0]
        else:
            state[name] = padded(weight, *target.shape)
    made.load_state_dict(state)
    return made


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float16")
    arguments = parser.parse_args(words)
    from transformers import AutoModelForCausalLM

    source = resolve(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wide = widen(model)
    ids = (torch.arange(64) * 37 % model.config.vocab_size)[None]
    with torch.inference_mode():
        gap = (wide(ids).logits - model(ids).logits).abs().max()
    print(f"largest difference of a logit: {gap:.2g}")
    wide.to(getattr(torch, arguments.dtype)).save_pretrained(arguments.folder)
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
