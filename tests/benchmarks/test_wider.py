"""A wider model gives the logits of the model it was made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks.conftest import load

BLOCK = 128


@pytest.fixture(scope="module")
def wider() -> Any:
    return load("wider")


@pytest.mark.parametrize("tied", [True, False])
def test_logits_stay_and_sizes_become_multiples(wider: Any, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).double()
    wide = wider.widen(model).double()
    assert wide.config.hidden_size % BLOCK == wide.config.intermediate_size % BLOCK == 0
    assert wide.config.num_key_value_heads * wide.config.head_dim % BLOCK == 0
    ids = (torch.arange(40) * 37 % 101)[None]
    with torch.inference_mode():
        before, after = model(ids).logits, wide(ids).logits
    assert float((before - after).abs().max()) < 1e-4, "the new weights are float32"
    assert float(before.std()) > 0.1
