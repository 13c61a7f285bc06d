"""MLX's devices, and its arrays as tensors of torch with the same bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.distributions import to_raw
from scoremode.errors import OptionError


def device_of(wanted: str | None) -> tuple[Any, str]:
    """The device that a user chose, or MLX's own choice, and its name for people; OptionError if there is none."""
    if wanted not in (None, "cpu", "gpu"):
        raise OptionError(f"--device {wanted} is not known to MLX", fix="give cpu or gpu")
    if wanted == "gpu" and not mx.is_available(mx.gpu):
        raise OptionError("--device gpu: MLX finds no GPU here", fix="use --device cpu")
    device = mx.default_device() if wanted is None else mx.Device(getattr(mx, wanted))
    kind = "gpu" if device == mx.gpu else "cpu"
    name = mx.device_info(device).get("device_name") if kind == "gpu" else None
    return device, f"gpu ({name})" if name else kind


def to_torch(x: Any) -> Tensor:
    """An array of MLX as a tensor with the same bits, on the CPU. It is computed here, and its graph is freed."""
    if x.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(x.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def to_mlx(x: Tensor) -> Any:
    """A tensor as an array of MLX with the same bits."""
    raw = mx.array(to_raw(x))
    return raw.view(mx.bfloat16) if x.dtype == torch.bfloat16 else raw
