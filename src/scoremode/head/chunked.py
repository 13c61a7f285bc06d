"""Scores from hidden states on any device, a few rows at a time: never [tokens, vocabulary] whole.

Logits of a chunk of rows are made in float32 under a byte budget, then reduced in slices small enough to stay in a
core's cache, because the reductions read every logit several times while the product writes it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scoremode.head.budget import DEFAULT_BUDGET
from scoremode.head.definition import Columns

LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states (n, d) -> logits (n, vocabulary)."""

FEW_TARGETS = 4  # a row: up to here counting beats sorting
CACHE_SLICE = 3 << 19  # bytes of logits reduced at a time on a CPU: 1.5 MiB, under the usual L2


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
    rows = max(1, (budget or DEFAULT_BUDGET) // (4 * vocabulary))
    parts = [reduce_logits(logits_of(hidden[i : i + rows]), targets[i : i + rows]) for i in range(0, len(hidden), rows)]
    if not parts:
        return empty_columns(hidden.device, targets.shape[1])
    return parts[0] if len(parts) == 1 else Columns.cat(parts)


def empty_columns(device: torch.device, k: int) -> Columns:
    floats = torch.zeros(0, device=device)
    ints = torch.zeros(0, dtype=torch.int64, device=device)
    return Columns(floats.reshape(0, k), ints.reshape(0, k), floats, ints, floats)


def reduce_logits(logits: Tensor, targets: Tensor) -> Columns:
    """Columns of a block of logits (n, vocabulary), in float32."""
    if logits.device.type != "cpu":
        return _reduce_slice(logits.float(), targets)
    rows = max(1, CACHE_SLICE // (4 * logits.shape[1]))
    return Columns.cat(
        [_reduce_slice(logits[i : i + rows].float(), targets[i : i + rows]) for i in range(0, len(logits), rows)]
    )


def _reduce_slice(x: Tensor, targets: Tensor) -> Columns:
    top, largest = _first_choice(x)
    at_target = x.gather(1, targets)
    rank = _ranks(x, at_target, targets)
    below = x - largest[:, None]
    p = below.exp()
    total = p.sum(1)
    log_total = total.log()
    mean_below = torch.linalg.vecdot(p, below) / total
    if not bool(torch.isfinite(mean_below).all()):  # a logit of -inf: 0 · -inf is nothing here, not NaN
        mean_below = torch.linalg.vecdot(p, below.nan_to_num(neginf=0.0, nan=float("nan"))) / total
    return Columns(
        logprob=at_target - largest[:, None] - log_total[:, None],
        rank=rank,
        entropy=(log_total - mean_below).clamp_min(0.0),
        top=top,
        top_logprob=-log_total,
    )


def _first_choice(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest id among the largest logits, and its logit.

    A maximum over blocks, then the place inside one block: a third of the time of ``torch.max`` on a CPU.
    """
    width = 256
    whole = x.shape[1] // width * width
    if whole == 0 or x.device.type != "cpu":
        largest, top = x.max(dim=1)
        return top, largest
    blocks = x[:, :whole].reshape(len(x), -1, width)
    per_block = blocks.amax(2)
    block = per_block.argmax(1)
    inside = blocks[torch.arange(len(x), device=x.device), block].argmax(1)
    top = block * width + inside
    largest = x.gather(1, top[:, None])[:, 0]
    if whole < x.shape[1]:
        tail_largest, tail_top = x[:, whole:].max(dim=1)
        better = (tail_largest > largest) | torch.isnan(tail_largest)
        top = torch.where(better, tail_top + whole, top)
        largest = torch.where(better, tail_largest, largest)
    return top, largest


def _ranks(x: Tensor, at_target: Tensor, targets: Tensor) -> Tensor:
    """1 + logits above the target's + equal logits of a lower id, (n, k)."""
    if targets.shape[1] <= FEW_TARGETS:
        counted = [_count_above(x, at_target[:, j : j + 1]) for j in range(targets.shape[1])]
        above = torch.stack([pair[0] for pair in counted], dim=1)
        at_least = torch.stack([pair[1] for pair in counted], dim=1)
    else:
        ordered = x.sort(dim=1).values
        above = x.shape[1] - torch.searchsorted(ordered, at_target.contiguous(), right=True)
        at_least = x.shape[1] - torch.searchsorted(ordered, at_target.contiguous(), right=False)
    tied = at_least > above + 1
    if bool(tied.any()):  # rare: only those rows are looked at again
        ids = torch.arange(x.shape[1], device=x.device)
        for row, j in tied.nonzero().tolist():
            above[row, j] += ((x[row] == at_target[row, j]) & (ids < targets[row, j])).sum()
    return above + 1


def _count_above(x: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits above the target's, and at least as large. Counting in float32 is exact below 2**24 ids, and fastest."""
    counter = torch.empty_like(x)
    above = torch.gt(x, at_target, out=counter).sum(1).long()
    at_least = torch.ge(x, at_target, out=counter).sum(1).long()
    return above, at_least
