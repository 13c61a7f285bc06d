"""What is known about a candidate's weights, and the two contracts: of a file format, and of a whole candidate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$")  # tells tokens their experts; nobody quantizes it


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One tensor of a candidate, under the name that the baseline's Transformers model gives it."""

    name: str  # model.layers.3.self_attn.q_proj.weight
    shape: Shape
    bits: float  # stored bits per weight, scales and zero points included
    format: str  # Q4_K, W4A16 g128, bfloat16, …


class CandidateWeights(Protocol):
    """The weights of a candidate, for the parameters of a baseline."""

    @property
    def label(self) -> str:
        """The candidate's name, for people."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results must know: what is approximated, left out or not emulated."""

    @property
    def stored(self) -> Mapping[str, StoredWeight]:
        """Every parameter of the baseline, by its name."""

    def tensor(self, name: str) -> torch.Tensor:
        """One parameter, de-quantized: float32, on the CPU. Nothing is kept, so memory does not grow with the model."""


class TensorReader(Protocol):
    """The tensors of a file format, under the names of the file. What is quantized appears as ``….weight``."""

    @property
    def stored(self) -> Mapping[str, StoredWeight]:
        """Every tensor that can be read."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, de-quantized: float32, on the CPU."""
