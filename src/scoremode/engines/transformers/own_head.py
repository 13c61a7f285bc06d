"""Finds the last matrix of a model, and decides whether two ways to compute the same thing agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scoremode.core.engine.options import DTYPES
from scoremode.head.matrix import Head


def find_head(model: Any) -> Head | None:
    """The last matrix of a model with its scale and cap, or None if it is not a plain matrix."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        return None
    weight, bias = layer.weight.detach(), layer.bias
    if str(weight.dtype).removeprefix("torch.") not in DTYPES or weight.device.type == "meta":
        return None
    config = model.config.get_text_config()
    scale = 1.0
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite divides
        scale /= float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere multiplies
        scale *= float(factor)
    if weight.device.type == "cpu" and weight.dtype in (torch.float16, torch.bfloat16):
        weight = weight.float()  # exact, and only once: on a CPU, half-precision products are slow and rounded
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight=weight,
        vocabulary=weight.shape[0],
        bias=None if bias is None else bias.detach(),
        scale=scale,
        softcap=None if cap is None else float(cap),
    )


def agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype, slack: float = 1.0) -> bool:
    """Are two tensors equal, up to ``slack`` × the rounding of the model's own dtype?"""
    if ours.shape != theirs.shape:
        return False
    size = theirs.abs().max().clamp_min(1.0)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 5e-3}.get(dtype, 2e-2)
    return bool(((ours - theirs).abs().max() / size) < slack * tolerance)
