"""A tolerance that is measured must let rounding pass, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import rounding


def swap_values(layer: Any) -> None:
    layer.values[:, :, [5, 6]] = layer.values[:, :, [6, 5]]


def round_a_key(layer: Any) -> None:
    layer.keys[:, :, 30] = layer.keys[:, :, 30].bfloat16().float()


def drop_a_token(layer: Any) -> None:
    layer.keys[:, :, 30] = layer.values[:, :, 30] = 0


@pytest.mark.parametrize("fault", [swap_values, round_a_key, drop_a_token, None])
def test_a_fault_in_one_place_of_a_cache_is_no_rounding(tiny: Path, fault: Callable[[Any], None] | None) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.randint(2, model.config.vocab_size, (1, 60), generator=torch.Generator().manual_seed(1))

    def last(**how: Any) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(**how).logits[0, -1].double()
        return logits.log_softmax(-1)

    with torch.no_grad():
        cache = model(ids[:, :59]).past_key_values
    if fault:
        fault(cache.layers[0])
    apart = float((last(input_ids=ids[:, 59:], past_key_values=cache) - last(input_ids=ids)).abs().max())
    limit = rounding.of_checkpoint(tiny)
    assert limit < 1e-3
    assert apart > 10 * limit if fault else apart < limit
