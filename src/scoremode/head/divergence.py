"""KL divergence of two distributions, computed from slices of the vocabulary whose partial sums are combined.

logits of both (n, slice) ──divergence_partials──▶ DivergencePartials ──combine──▶ of the whole ──finish──▶ Divergence

``p`` is the baseline and ``q`` the candidate: KL(p‖q) measures what is lost when q replaces p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scoremode.head.budget import rows_of_workspace
from scoremode.head.definition import Columns, RowBlock, define_columns
from scoremode.head.partials import FAR_BELOW, LOWEST, Partials, combine, finish, partials


@dataclass(frozen=True, slots=True)
class Divergence(RowBlock):
    """For each row of hidden states: the divergence, and the candidate's columns."""

    kl: Tensor  # (n,) nats, Σ p · (log p - log q)
    q: Columns


@dataclass(frozen=True, slots=True)
class DivergencePartials(RowBlock):
    """What one slice of the vocabulary contributes to each row.

    The sums of the divergence are separate from those of the scores. A candidate's scores must have the same bits as
    when it is scored alone: otherwise a model compared with itself could differ.
    """

    q: Partials  # the same bits as from ``Kernel.reduce``
    largest_p: Tensor  # (n,) float32, -inf if the slice is empty
    largest_q: Tensor  # (n,)
    total_p: Tensor  # (n,) Σ exp(x_p - largest_p), in float64 if the kernel adds in float64
    total_q: Tensor  # (n,)
    cross: Tensor  # (n,) Σ exp(x_p - largest_p) · ((x_p - largest_p) - (x_q - largest_q))

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """Everything except the candidate's partials, in the order of the fields."""
        return self.largest_p, self.largest_q, self.total_p, self.total_q, self.cross


def define_divergence(p_logits: Tensor, q_logits: Tensor, targets: Tensor) -> Divergence:
    """The definition, slow and in float64. If q is 0 for an id and p is not, the divergence is infinite."""
    log_p, log_q = (torch.log_softmax(x.double(), dim=-1) for x in (p_logits, q_logits))
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return Divergence(terms.sum(-1), define_columns(q_logits, targets))


def divergence_partials(
    x_p: Tensor, x_q: Tensor, targets: Tensor, at_q: Tensor, first_id: int = 0, one_pass: bool = True
) -> DivergencePartials:
    """Reduce a block of logits of both models (n, width); may overwrite q's. The sums are in float64.

    KL is a small difference of large sums: in float32 it would be accurate to only about 3e-7 nats, which is more than
    the difference between two good quantizations.
    """
    sums = _sums_in_float64(x_p, x_q)
    # the same call on the same memory layout as in ``Kernel.reduce``, so that q's bits are the same
    return DivergencePartials(partials(x_q, targets, at_q, first_id, one_pass), *sums)


def divergence_of(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p‖q) (n,) in float64, from float32 logits of both over the whole vocabulary. Changes neither.

    >>> divergence_of(torch.zeros(1, 3), torch.zeros(1, 3)).tolist()
    [0.0]
    """
    return _from_sums(*_sums_in_float64(p_logits, q_logits)[2:])


COPIES = 4  # most float64 copies of a row's logits in memory at once


def _sums_in_float64(x_p: Tensor, x_q: Tensor) -> tuple[Tensor, ...]:
    """The sums of a block, a few rows at a time, because float64 copies need memory."""
    n, width = x_p.shape
    if n == 0 or width == 0:
        return empty_sums(x_p, torch.float64)
    largest = [x.amax(1).float() for x in (x_p, x_q)]
    total_p, total_q, cross = torch.empty(3, n, dtype=torch.float64, device=x_p.device)
    step = rows_of_workspace(width, 8 * COPIES, x_p.device.type)
    for rows in (slice(i, i + step) for i in range(0, n, step)):
        below_p, below_q = (
            x[rows].double().sub_(most[rows].double().clamp_min_(LOWEST)[:, None])
            for x, most in zip((x_p, x_q), largest, strict=True)
        )
        weight = below_q.exp()
        torch.sum(weight, 1, out=total_q[rows])
        torch.exp(below_p, out=weight)
        torch.sum(weight, 1, out=total_p[rows])
        gap = below_p.sub_(below_q).mul_(weight).masked_fill_(weight == 0, 0.0)  # an id that p forbids adds 0
        torch.sum(gap, 1, out=cross[rows])
    return *largest, total_p, total_q, cross


def empty_sums(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The sums of an empty slice of the vocabulary, for the rows of ``like``."""
    nothing = torch.zeros(len(like), dtype=dtype, device=like.device)
    lowest = torch.full((len(like),), float("-inf"), device=like.device)
    return lowest, lowest, nothing, nothing, nothing


def combine_divergence(parts: list[DivergencePartials]) -> DivergencePartials:
    """The partials of the union of neighbouring slices, which are given in the order of their ids."""
    if len(parts) == 1:
        return parts[0]
    each_p, each_q, total_p, total_q, cross = (torch.stack(x) for x in zip(*(d.sums for d in parts), strict=True))
    largest_p, largest_q = each_p.amax(0), each_q.amax(0)
    drop_p, drop_q = (
        each.to(total_p.dtype) - most.to(total_p.dtype) for each, most in ((each_p, largest_p), (each_q, largest_q))
    )
    # a slice without p (empty, or too far below the largest logit) adds nothing, whatever q is there
    share = torch.where(total_p > 0, drop_p.exp(), 0.0)
    moved = torch.where(share > 0, share * (cross + (drop_p - drop_q) * total_p), 0.0)
    whole_p, whole_q = (
        (drop.clamp_min(FAR_BELOW).exp() * total).sum(0) for drop, total in ((drop_p, total_p), (drop_q, total_q))
    )
    return DivergencePartials(combine([d.q for d in parts]), largest_p, largest_q, whole_p, whole_q, moved.sum(0))


def finish_divergence(whole: DivergencePartials, at_q: Tensor) -> Divergence:
    """The divergence and the candidate's columns, from the partials of the whole vocabulary."""
    return Divergence(_from_sums(whole.total_p, whole.total_q, whole.cross), finish(whole.q, at_q))


def _from_sums(total_p: Tensor, total_q: Tensor, cross: Tensor) -> Tensor:
    # log(total_q / total_p), without losing digits if both are nearly equal
    ratio = torch.log1p((total_q - total_p) / total_p)
    return (cross / total_p + ratio).clamp_min(0.0)
