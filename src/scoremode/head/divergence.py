"""How far two distributions are apart, computed from slices of the vocabulary whose partial sums are combined.

logits of both (n, slice) ──divergence_partials──▶ DivergencePartials ──combine──▶ of the whole ──finish──▶ Divergence

``p`` is the baseline and ``q`` the candidate: KL(p‖q) measures what is lost when q replaces p. A probability is known
only after the whole vocabulary was added up, so Σ |p - q| takes a second step over the same logits. Slices exchange
their sums in between (``Gather``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scoremode.head.budget import FIRST, rows_of_workspace
from scoremode.head.columns import (
    FAR_BELOW,
    LOWEST,
    Columns,
    Partials,
    RowBlock,
    combine,
    define_columns,
    finish,
    partials,
)
from scoremode.head.first_choices import agreement, first_choices, joined_choices

Gather = Callable[[Tensor], list[Tensor]]
"""Gives a tensor (n, c) of every slice to every slice, in the order of their ids. Tensor-parallel ranks exchange it.
Without it, only KL(p‖q) is measured: a slice alone does not know the probabilities that Σ |p - q| needs, and the other
columns take time that a comparison which shows none of them can save."""


Kept = dict[tuple[int, ...], Tensor]
"""Blocks of p's logits by their place, if many candidates are compared with the same rows of p. A kernel numbers its
blocks in the same way for every candidate, and only reads what it is given."""


def gather_own(sums: Tensor) -> list[Tensor]:
    """Returns the tensor alone: the ``Gather`` of a head that is not sliced."""
    return [sums]


def kept_block(kept: Kept | None, place: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
    """Returns a block of p's logits, which is computed the first time; every time if nothing is kept."""
    if kept is None:
        return compute()
    if place not in kept:
        kept[place] = compute()
    return kept[place]


@dataclass(frozen=True, slots=True)
class Divergence(RowBlock):
    """For each row of hidden states: how far the two distributions are apart, and the candidate's columns.

    None: this kernel does not measure it.
    """

    kl: Tensor  # (n,) nats, Σ p · (log p - log q)
    q: Columns
    kl_reverse: Tensor | None = None  # (n,) nats, Σ q · (log q - log p)
    total_variation: Tensor | None = None  # (n,) ½ Σ |p - q|, from 0 to 1
    same_first: Tensor | None = None  # (n,) int64, leading choices that are the same ids in the same order, up to 5


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
    cross_q: Tensor | None = None  # (n,) the same with p and q exchanged
    first_p: Tensor | None = None  # (n, FIRST) int64, see first_choices.py
    first_q: Tensor | None = None  # (n, FIRST)
    apart: Tensor | None = None  # (n,) Σ |p - q| over the slice, where p and q are probabilities of the whole

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """The sums that every kernel measures, in the order of the fields."""
        return self.largest_p, self.largest_q, self.total_p, self.total_q, self.cross

    def in_float64(self) -> DivergencePartials:
        """The same with all sums in float64, as they are combined."""
        largest_p, largest_q, total_p, total_q, cross = (x.double() for x in self.sums)
        return replace(self, largest_p=largest_p, largest_q=largest_q, total_p=total_p, total_q=total_q, cross=cross)


def define_divergence(p_logits: Tensor, q_logits: Tensor, targets: Tensor) -> Divergence:
    """The definition, slow and in float64. If q is 0 for an id and p is not, KL(p‖q) is infinite.

    Of equal logits the lower id is chosen first. A vocabulary of fewer than 5 ids whose choices are all the same counts
    as 5.
    """
    log_p, log_q = (torch.log_softmax(x.double(), dim=-1) for x in (p_logits, q_logits))
    p, q = log_p.exp(), log_q.exp()
    kl = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p)).sum(-1)
    kl_reverse = torch.where(q > 0, q * (log_q - log_p), torch.zeros_like(q)).sum(-1)
    order_p, order_q = (x.double().sort(dim=-1, descending=True, stable=True).indices for x in (p_logits, q_logits))
    same = (order_p == order_q)[:, :FIRST].long().cumprod(-1).sum(-1)
    same = torch.where(same == p.shape[-1], FIRST, same)
    return Divergence(kl, define_columns(q_logits, targets), kl_reverse, (p - q).abs().sum(-1) / 2, same)


def divergence_partials(
    x_p: Tensor,
    x_q: Tensor,
    targets: Tensor,
    at_q: Tensor,
    first_id: int = 0,
    one_pass: bool = True,
    gather: Gather | None = None,
) -> DivergencePartials:
    """Reduce a block of logits of both models (n, width); may overwrite q's. The sums are in float64.

    KL is a small difference of large sums: in float32 it would be accurate to only about 3e-7 nats, which is more than
    the difference between two good quantizations.
    """
    fields: tuple[Any, ...]
    *sums, cross_q, apart = _sums_in_float64(x_p, x_q, whole=gather is not None)
    fields = (*sums,)
    if gather is not None:
        if gather is not gather_own:  # other slices change the probabilities
            apart = sum_apart(x_p, x_q, *log_totals(sums, gather))
        fields = (*sums, cross_q, *(first_choices(x, first_id) for x in (x_p, x_q)), apart)
    # the same call on the same memory layout as in ``Kernel.reduce``, so that q's bits are the same
    return DivergencePartials(partials(x_q, targets, at_q, first_id, one_pass), *fields)


def divergence_of(p_logits: Tensor, q_logits: Tensor) -> dict[str, Tensor]:
    """The fields of a ``Divergence`` except q, from float32 logits over the whole vocabulary. Changes neither.

    >>> divergence_of(torch.zeros(1, 3), torch.zeros(1, 3))["kl"].tolist()
    [0.0]
    """
    _, _, total_p, total_q, cross, cross_q, apart = _sums_in_float64(p_logits, q_logits)
    return {
        "kl": _from_sums(total_p, total_q, cross),
        "kl_reverse": _from_sums(total_q, total_p, cross_q),
        "total_variation": _variation(apart),
        "same_first": agreement(first_choices(p_logits), first_choices(q_logits)),
    }


COPIES = 4  # most float64 copies of a row's logits in memory at once
APART_COPIES = 8  # two copies, in a quarter of the workspace: what is read again at once should stay in the L2 cache


def _sums_in_float64(x_p: Tensor, x_q: Tensor, whole: bool = True) -> tuple[Tensor, ...]:
    """The sums of a block, a few rows at a time, because float64 copies need memory.

    The last two, ``cross_q`` and Σ |p - q|, take the block for the whole vocabulary; only ``whole`` computes them.
    """
    n, width = x_p.shape
    if n == 0 or width == 0:
        empty = empty_sums(x_p, torch.float64, both_ways=True)
        return *empty, empty[-1]
    largest = [x.amax(1).float() for x in (x_p, x_q)]
    total_p, total_q, cross, cross_q, apart = torch.empty(5, n, dtype=torch.float64, device=x_p.device)
    step = rows_of_workspace(width, 8 * COPIES, x_p.device.type)
    for rows in (slice(i, i + step) for i in range(0, n, step)):
        below_p, below_q = (
            x[rows].double().sub_(most[rows].double().clamp_min_(LOWEST)[:, None])
            for x, most in zip((x_p, x_q), largest, strict=True)
        )
        weight_p, weight_q = below_p.exp(), below_q.exp()
        torch.sum(weight_q, 1, out=total_q[rows])
        torch.sum(weight_p, 1, out=total_p[rows])
        gap = below_p.sub_(below_q)
        if whole:
            sum_cross(gap, weight_q, below_q, cross_q[rows]).neg_()
        sum_cross(gap, weight_p, gap, cross[rows])
        if not whole:
            continue
        p, q = weight_p.div_(total_p[rows, None]), weight_q.div_(total_q[rows, None])
        torch.sum(p.sub_(q).abs_(), 1, out=apart[rows])
    return *largest, total_p, total_q, cross, cross_q, apart


def sum_cross(gap: Tensor, weight: Tensor, scratch: Tensor, out: Tensor) -> Tensor:
    """Writes Σ weight · gap to ``out``. Ids without weight add 0; an infinite gap with a weight makes Σ infinite."""
    product = torch.mul(gap, weight, out=scratch)
    if product.device.type != "cpu" or math.isnan(float(torch.sum(product, 1, out=out).sum())):  # a GPU is not read
        torch.sum(product.masked_fill_(weight == 0, 0.0), 1, out=out)  # NaN is from 0 · -inf, or -inf - -inf
    return out


def log_totals(sums: Sequence[Tensor], gather: Gather) -> tuple[Tensor, Tensor]:
    """log Σ exp(x) of both models over the whole vocabulary, (n,) in float64, from the sums of every slice."""
    local_sums = torch.stack([x.double() for x in sums[:4]], 1)  # largest_p, largest_q, total_p, total_q
    # sent as float32 because some collectives know no other type; gathering only copies bits
    every = [part.contiguous().view(torch.float64) for part in gather(local_sums.view(torch.float32))]
    if len(every) == 1:
        logs = local_sums[:, :2] + local_sums[:, 2:].log()
    else:
        each = torch.stack(every)
        largest = each[:, :, :2].amax(0)
        drop = (each[:, :, :2] - largest).clamp_min(FAR_BELOW)
        logs = largest + (drop.exp() * each[:, :, 2:]).sum(0).log()
    return logs[:, 0], logs[:, 1]


def sum_apart(x_p: Tensor, x_q: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ |p - q| over a block of logits, (n,) in float64; ``log_totals`` gives the logarithms."""
    n, width = x_p.shape
    apart = torch.zeros(n, dtype=torch.float64, device=x_p.device)
    step = min(max(1, n), rows_of_workspace(width, 8 * APART_COPIES, x_p.device.type))
    space = torch.empty(2, step, width, dtype=torch.float64, device=x_p.device)
    for rows in (slice(i, min(i + step, n)) for i in range(0, n if width else 0, step)):
        p, q = (
            buffer[: rows.stop - rows.start].copy_(x[rows]).sub_(log[rows, None]).exp_()
            for buffer, x, log in zip(space, (x_p, x_q), (log_p, log_q), strict=True)
        )
        torch.sum(p.sub_(q).abs_(), 1, out=apart[rows])
    return apart


def empty_sums(like: Tensor, dtype: torch.dtype, both_ways: bool = False) -> tuple[Tensor, ...]:
    """The sums of an empty slice of the vocabulary, for the rows of ``like``; with ``cross_q`` if both ways."""
    nothing = torch.zeros(len(like), dtype=dtype, device=like.device)
    lowest = torch.full((len(like),), float("-inf"), device=like.device)
    return (lowest, lowest, *[nothing] * (4 if both_ways else 3))


def combine_divergence(parts: list[DivergencePartials]) -> DivergencePartials:
    """The partials of the union of neighbouring slices, which are given in the order of their ids."""
    if len(parts) == 1:
        return parts[0]
    each_p, each_q, total_p, total_q, cross = (torch.stack(x) for x in zip(*(d.sums for d in parts), strict=True))
    largest_p, largest_q = each_p.amax(0), each_q.amax(0)
    drop_p, drop_q = (
        each.to(total_p.dtype) - most.to(total_p.dtype) for each, most in ((each_p, largest_p), (each_q, largest_q))
    )
    whole_p, whole_q = (
        (drop.clamp_min(FAR_BELOW).exp() * total).sum(0) for drop, total in ((drop_p, total_p), (drop_q, total_q))
    )
    sums = (largest_p, largest_q, whole_p, whole_q, moved_cross(drop_p, drop_q, total_p, cross))
    whole = combine([d.q for d in parts])
    if parts[0].apart is None:  # KL alone
        return DivergencePartials(whole, *sums)
    cross_q, apart = (torch.stack([getattr(d, name) for d in parts]) for name in ("cross_q", "apart"))
    first_p, first_q = (joined_choices([getattr(d, name) for d in parts]) for name in ("first_p", "first_q"))
    return DivergencePartials(
        whole, *sums, moved_cross(drop_q, drop_p, total_q, cross_q), first_p, first_q, apart.sum(0)
    )


def moved_cross(drop_p: Tensor, drop_q: Tensor, total_p: Tensor, cross: Tensor) -> Tensor:
    """Σ of ``cross`` over slices (slices, n), each shifted to the largest logits of the whole."""
    # a slice without p (empty, or too far below the largest logit) adds nothing, whatever q is there
    share = torch.where(total_p > 0, drop_p.exp(), 0.0)
    return torch.where(share > 0, share * (cross + (drop_p - drop_q) * total_p), 0.0).sum(0)


def finish_divergence(whole: DivergencePartials, at_q: Tensor) -> Divergence:
    """The divergence and the candidate's columns, from the partials of the whole vocabulary."""
    cross_q, first_p, first_q = whole.cross_q, whole.first_p, whole.first_q
    return Divergence(
        kl=_from_sums(whole.total_p, whole.total_q, whole.cross),
        q=finish(whole.q, at_q),
        kl_reverse=None if cross_q is None else _from_sums(whole.total_q, whole.total_p, cross_q),
        total_variation=None if whole.apart is None else _variation(whole.apart),
        same_first=None if first_p is None or first_q is None else agreement(first_p, first_q),
    )


def _variation(apart: Tensor) -> Tensor:
    return (apart / 2).clamp_max(1.0)  # the sum of all probabilities may round to more than 1


def _from_sums(total_p: Tensor, total_q: Tensor, cross: Tensor) -> Tensor:
    # log(total_q / total_p), without losing digits if both are nearly equal
    ratio = torch.log1p((total_q - total_p) / total_p)
    return (cross / total_p + ratio).clamp_min(0.0)
