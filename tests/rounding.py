"""How far two float32 computations of one number may lie apart: tolerances that follow from sizes or are measured here,
and not read off one CPU, whose library adds in one of many orders."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

EPS = 2.0**-23  # the spacing of float32 at 1


def of_sums(numbers: int, size: float) -> float:
    """What two orders of adding may differ by, for sums of so many numbers that stay below ``size``.

    Every addition rounds, up as often as down, so that the roundings of a sum add up to about their root.
    """
    return 2 * EPS * math.sqrt(numbers) * size


@cache
def of_checkpoint(folder: Path) -> float:
    """``of_model`` of what lies in a folder."""
    from transformers import AutoModelForCausalLM

    return of_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@torch.no_grad()
def of_model(model: Any) -> float:
    """Nats by which the log-probabilities of two float32 programs may differ for this model, measured on this machine.

    The measure is the largest error of Transformers in float32 against float64, over all ids after 100 random ones.
    Two programs have two such errors, and those of one that adds number by number are about twice as large. What must
    be found moves ten times as much, even one key in bfloat16: see ``test_rounding.py``.
    """
    length = min(100, getattr(model.config, "max_position_embeddings", 100))
    ids = torch.randint(2, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    model = copy.deepcopy(model).float().eval()
    exact = copy.deepcopy(model).double()(ids).logits.log_softmax(-1)
    return 4 * float((model(ids).logits.double().log_softmax(-1) - exact).abs().max())
