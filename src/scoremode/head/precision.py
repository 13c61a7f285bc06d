"""Computes float32 products in float32, not in TF32 or bfloat16, whatever the process or its environment has set.

PyTorch has switches that let float32 products be rounded to TF32 (10 bits) on a GPU, or to bfloat16 (8 bits) on a CPU
with AMX. The switches are often set for training, in code or by a container image's environment. A score computed with
such rounding is not a float32 score.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from scoremode.errors import EngineError

EXACT = "ieee"
ALLOWED = 2.0**-18  # relative error of a sum of 64 products: float32 has at most 2**-22, TF32 up to 2**-11
FORCED = "NVIDIA_TF32_OVERRIDE"  # read by NVIDIA's libraries themselves; overrides every switch of PyTorch


@contextmanager
def full_float32() -> Iterator[None]:
    """Computes products and convolutions in full float32 inside the block; restores every switch afterwards.

    >>> before = torch.get_float32_matmul_precision()
    >>> torch.set_float32_matmul_precision("medium")
    >>> with full_float32():
    ...     product_precision("cpu")
    'ieee'
    >>> torch.get_float32_matmul_precision()
    'medium'
    >>> torch.set_float32_matmul_precision(before)
    """
    switches = _switches()
    before = [getattr(owner, name) for owner, name, _ in switches]
    try:
        for owner, name, exact in switches:
            setattr(owner, name, exact)
        yield
    finally:
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


def product_precision(device: str) -> str:
    """Returns how this process multiplies float32 matrices now: ``ieee``, ``tf32`` or ``bf16``."""
    backends: Any = torch.backends
    owner = backends.cuda.matmul if device == "cuda" else backends.mkldnn.matmul
    if hasattr(owner, "fp32_precision"):
        precision = str(owner.fp32_precision)
        return EXACT if precision == "none" else precision
    return {"highest": EXACT, "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")


@lru_cache
def _switches() -> list[tuple[Any, str, Any]]:
    """Returns (owner, attribute, value that means float32) of every switch that this version of PyTorch has."""
    backends: Any = torch.backends
    owners = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    owners += [getattr(backends.mkldnn, name) for name in ("matmul", "conv", "rnn") if hasattr(backends.mkldnn, name)]
    if all(hasattr(owner, "fp32_precision") for owner in owners):
        return [(owner, "fp32_precision", EXACT) for owner in owners]
    return [(_Legacy(), "matmul", "highest"), (backends.cudnn, "allow_tf32", False)]


class _Legacy:
    """The switches of PyTorch versions that have no ``fp32_precision``."""

    @property
    def matmul(self) -> str:
        return torch.get_float32_matmul_precision()

    @matmul.setter
    def matmul(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)


def require_float32(device: torch.device) -> None:
    """Raises EngineError if this device rounds float32 products to fewer bits although no switch says so."""
    error = product_error(device)
    if error <= ALLOWED:
        return
    forced = os.environ.get(FORCED)
    fix = f"unset {FORCED} (it is {forced})" if forced not in (None, "0") else "use --dtype bfloat16, and report this"
    raise EngineError(f"float32 products on {device.type} are off by {error:.1g} of their size", fix=fix)


def product_error(device: torch.device) -> float:
    """Returns the largest error of a float32 product on this device, relative to Σ |a · b| in float64."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=random) for shape in ((48, 64), (64, 160)))
    with full_float32():
        product = torch.mm(a.to(device), b.to(device)).cpu()
    size = a.double().abs() @ b.double().abs()
    return float(((product.double() - a.double() @ b.double()).abs() / size).max())
