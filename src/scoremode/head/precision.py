"""float32 products in float32: no TF32, no bfloat16, whatever this process or its environment asks for elsewhere.

PyTorch has switches that let float32 products be rounded to TF32 (10 bits) on a GPU, or to bfloat16 (8 bits) on a CPU
with AMX. They are set for training, by a line of somebody's code or by an image's environment. A score made under
them is no float32 score.
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
ALLOWED = 2.0**-18  # of the size of a sum of 64 products: float32 is off by 2**-22 at most, TF32 by 2**-11
FORCED = "NVIDIA_TF32_OVERRIDE"  # read by NVIDIA's libraries themselves: no switch of PyTorch goes before it


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 products and convolutions are float32 ones; afterwards every switch is what it was.

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
    """How this process multiplies float32 matrices now: ``ieee``, ``tf32`` or ``bf16``."""
    backends: Any = torch.backends
    owner = backends.cuda.matmul if device == "cuda" else backends.mkldnn.matmul
    if hasattr(owner, "fp32_precision"):
        found = str(owner.fp32_precision)
        return EXACT if found == "none" else found
    return {"highest": EXACT, "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")


@lru_cache
def _switches() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value that means float32) of every switch that this version of PyTorch has."""
    backends: Any = torch.backends
    owners = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    owners += [getattr(backends.mkldnn, name) for name in ("matmul", "conv", "rnn") if hasattr(backends.mkldnn, name)]
    if all(hasattr(owner, "fp32_precision") for owner in owners):
        return [(owner, "fp32_precision", EXACT) for owner in owners]
    return [(_Legacy(), "matmul", "highest"), (backends.cudnn, "allow_tf32", False)]


class _Legacy:
    """PyTorch before its switches had one name each."""

    @property
    def matmul(self) -> str:
        return torch.get_float32_matmul_precision()

    @matmul.setter
    def matmul(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)


def require_float32(device: torch.device) -> None:
    """An error where float32 products of this device are rounded to fewer bits although no switch says so."""
    error = product_error(device)
    if error <= ALLOWED:
        return
    forced = os.environ.get(FORCED)
    fix = f"unset {FORCED} (it is {forced})" if forced not in (None, "0") else "use --dtype bfloat16, and report this"
    raise EngineError(f"float32 products on {device.type} are off by {error:.1g} of their size", fix=fix)


def product_error(device: torch.device) -> float:
    """How far a float32 product of this device lies from float64, as a share of Σ |a · b|, at most."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=random) for shape in ((48, 64), (64, 160)))
    with full_float32():
        found = torch.mm(a.to(device), b.to(device)).cpu()
    size = a.double().abs() @ b.double().abs()
    return float(((found.double() - a.double() @ b.double()).abs() / size).max())
