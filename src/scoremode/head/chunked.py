"""Scores from hidden states on any device, a few rows at a time: never [tokens, vocabulary] whole.

Logits of a chunk of rows are made in float32 under a byte budget, then reduced to a few numbers a row (partials.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scoremode.head.budget import rows_within
from scoremode.head.definition import Columns
from scoremode.head.partials import finish, partials, target_logits

LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states (n, d) -> logits (n, vocabulary)."""


@dataclass(frozen=True, slots=True)
class Head:
    """The last matrix of a model, and what the model does to its product.

    ``vocabulary`` is the number of real rows: rows behind it are padding and get no probability.
    """

    weight: Tensor  # (padded vocabulary, d)
    vocabulary: int
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits (n, vocabulary), accumulated in float32 whatever the dtype of the weights."""
        weight = self.weight[: self.vocabulary]
        x = product_in_float32(hidden, weight)
        if self.bias is not None:
            x += self.bias[: self.vocabulary].float()
        if self.scale != 1.0:
            x *= self.scale
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x


def product_in_float32(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden @ weight.T``, kept in float32 to the end: low-precision inputs, but never a low-precision output."""
    if weight.dtype == torch.float32:
        return torch.mm(hidden.float(), weight.T)
    if weight.is_cuda and hidden.dtype == weight.dtype:
        # the tensor cores accumulate in float32; this keeps what they have instead of rounding it to bf16
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return torch.cat([torch.mm(hidden.float(), block.float().T) for block in torch.split(weight, 8192)], dim=1)


def score_rows(hidden: Tensor, logits_of: LogitsOf, targets: Tensor, vocabulary: int, budget: int = 0) -> Columns:
    """Columns for every row of ``hidden`` (n, d) and its ``targets`` (n, k); ``budget`` bytes of logits at most."""
    rows = rows_within(budget, vocabulary, hidden.device.type)
    parts = [reduce_logits(logits_of(hidden[i : i + rows]), targets[i : i + rows]) for i in range(0, len(hidden), rows)]
    if not parts:
        return empty_columns(hidden.device, targets.shape[1])
    return parts[0] if len(parts) == 1 else Columns.cat(parts)


def empty_columns(device: torch.device, k: int) -> Columns:
    floats = torch.zeros(0, device=device)
    ints = torch.zeros(0, dtype=torch.int64, device=device)
    return Columns(floats.reshape(0, k), ints.reshape(0, k), floats, ints, floats)


def reduce_logits(logits: Tensor, targets: Tensor) -> Columns:
    """Columns of a block of logits (n, vocabulary), in float32. May overwrite the block."""
    at_target = target_logits(logits, targets)
    return finish(partials(logits, targets, at_target), at_target)
