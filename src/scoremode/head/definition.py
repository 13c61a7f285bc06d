"""The definition of a score, in float64. It is slow and obvious, and every fast path is tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


class RowBlock:
    """A block of rows. Its fields are tensors with one line per row, other blocks of the same rows, or None."""

    __slots__ = ()

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the rows of several blocks."""
        if len(parts) == 1:
            return parts[0]
        build: Any = cls  # a dataclass, whose slots are its fields
        each: list[list[Any]] = [[getattr(part, name) for part in parts] for name in build.__slots__]
        found: Self = build(*map(_joined, each))
        return found


def _joined(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return type(parts[0]).cat(parts) if isinstance(parts[0], RowBlock) else torch.cat(list(parts))


@dataclass(frozen=True, slots=True)
class Columns(RowBlock):
    """One line per row of hidden states, one column per target of that row."""

    logprob: Tensor  # (n, k) nats
    rank: Tensor  # (n, k) int64, 1 = first choice
    entropy: Tensor  # (n,) nats
    top: Tensor  # (n,) int64
    top_logprob: Tensor  # (n,) nats


def define_columns(logits: Tensor, targets: Tensor) -> Columns:
    """Returns ``log_softmax(logits)`` at the targets, with rank, entropy and first choice.

    ``rank = 1 + #{v : x_v > x_t, or x_v = x_t and v < t}``: of equal logits the lower id ranks first. So rank 1 means
    that the target *is* the first choice, and a uniform model does not get rank 1 for every target.
    """
    x = logits.double()
    logp = torch.log_softmax(x, dim=-1)
    at_target = x.gather(-1, targets)
    ids = torch.arange(x.shape[-1], device=x.device)
    above = x[:, None, :] > at_target[:, :, None]
    tied_before = (x[:, None, :] == at_target[:, :, None]) & (ids < targets[:, :, None])
    p = logp.exp()
    top = torch.argmax(x, dim=-1)
    return Columns(
        logprob=logp.gather(-1, targets),
        rank=1 + (above | tied_before).sum(-1),
        entropy=-torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1),
        top=top,
        top_logprob=logp.gather(-1, top[:, None])[:, 0],
    )


def define_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Returns ``cap · tanh((hidden @ weight.T + bias) · scale / cap)``, in float64."""
    x = hidden.double() @ weight.double().T
    if bias is not None:
        x = x + bias.double()
    x = x * scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)
