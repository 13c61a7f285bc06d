"""How far one distribution lies from another, from slices of the vocabulary that add up exactly.

logits of both (n, slice) ──divergence_partials──▶ DivergencePartials ──combine──▶ of the whole ──finish──▶ Divergence

``p`` is the baseline and ``q`` the candidate: KL(p‖q) says what is lost when q is used in place of p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scoremode.head.definition import Columns, define_columns
from scoremode.head.partials import FAR_BELOW, LOWEST, Partials, combine, finish, partials


@dataclass(frozen=True, slots=True)
class Divergence:
    """A line per row: the divergence, and the columns of either side."""

    kl: Tensor  # (n,) nats, Σ p · (log p - log q)
    p: Columns
    q: Columns

    @staticmethod
    def cat(parts: list[Divergence]) -> Divergence:
        if len(parts) == 1:
            return parts[0]
        return Divergence(
            torch.cat([d.kl for d in parts]), Columns.cat([d.p for d in parts]), Columns.cat([d.q for d in parts])
        )


@dataclass(frozen=True, slots=True)
class DivergencePartials:
    """What one slice of the vocabulary contributes to each row."""

    p: Partials
    q: Partials
    cross: Tensor  # (n,) Σ exp(x_p - largest_p) · ((x_p - largest_p) - (x_q - largest_q))

    @staticmethod
    def cat(parts: list[DivergencePartials]) -> DivergencePartials:
        """The rows of several blocks, one after the other."""
        if len(parts) == 1:
            return parts[0]
        p, q = Partials.cat([d.p for d in parts]), Partials.cat([d.q for d in parts])
        return DivergencePartials(p, q, torch.cat([d.cross for d in parts]))


def define_divergence(p_logits: Tensor, q_logits: Tensor, targets: Tensor) -> Divergence:
    """The definition, slow and in float64. Where q is 0 and p is not, the divergence is infinite."""
    log_p, log_q = (torch.log_softmax(x.double(), dim=-1) for x in (p_logits, q_logits))
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return Divergence(terms.sum(-1), define_columns(p_logits, targets), define_columns(q_logits, targets))


def divergence_partials(
    x_p: Tensor, x_q: Tensor, targets: Tensor, at_p: Tensor, at_q: Tensor, first_id: int = 0, one_pass: bool = True
) -> DivergencePartials:
    """Reduce a block of logits of both sides (n, width). The sums of the divergence are in float64.

    KL is a small difference of large sums: in float32 it would be good to about 3e-7 nats only, which is more than
    separates two good quantizations.
    """
    p, q = (partials(x.clone(), targets, at, first_id, one_pass) for x, at in ((x_p, at_p), (x_q, at_q)))
    if x_p.shape[1] == 0:
        return DivergencePartials(p, q, torch.zeros(len(x_p), dtype=torch.float64, device=x_p.device))
    below_p, below_q = (
        x.double() - part.largest.double().clamp_min(LOWEST)[:, None] for x, part in ((x_p, p), (x_q, q))
    )
    weight_p, weight_q = below_p.exp(), below_q.exp()
    cross = torch.where(weight_p > 0, weight_p * (below_p - below_q), 0.0).sum(1)
    return DivergencePartials(
        _with_sums(p, weight_p.sum(1), (weight_p * below_p.clamp_min(FAR_BELOW)).sum(1)),
        _with_sums(q, weight_q.sum(1), (weight_q * below_q.clamp_min(FAR_BELOW)).sum(1)),
        cross,
    )


def _with_sums(part: Partials, total: Tensor, weighted: Tensor) -> Partials:
    return Partials(part.largest, part.where, total, weighted, part.before)


def combine_divergence(parts: list[DivergencePartials]) -> DivergencePartials:
    """Partials of neighbouring slices, in order of their ids, as those of their union."""
    if len(parts) == 1:
        return parts[0]
    p, q = combine([d.p for d in parts]), combine([d.q for d in parts])
    drop_p = torch.stack([d.p.largest for d in parts]).to(p.total.dtype) - p.largest
    drop_q = torch.stack([d.q.largest for d in parts]).to(p.total.dtype) - q.largest
    total_p = torch.stack([d.p.total for d in parts])
    cross = torch.stack([d.cross for d in parts])
    # a slice without p (empty, or too far below to count) adds nothing, however far q lies there
    share = torch.where(total_p > 0, drop_p.exp(), 0.0)
    moved = torch.where(share > 0, share * (cross + (drop_p - drop_q) * total_p), 0.0)
    return DivergencePartials(p, q, moved.sum(0))


def finish_divergence(whole: DivergencePartials, at_p: Tensor, at_q: Tensor) -> Divergence:
    """The divergence and both sides' columns, from the partials of the whole vocabulary."""
    p, q = whole.p, whole.q
    # log(total_q / total_p), without losing the digits where both are nearly equal
    ratio = torch.log1p((q.total - p.total) / p.total)
    kl = (whole.cross / p.total + ratio).clamp_min(0.0)
    return Divergence(kl, finish(p, at_p), finish(q, at_q))
