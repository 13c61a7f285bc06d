"""How far two models are apart, by the fused kernels: KL(p‖q) alone, or every column of a divergence.

KL alone multiplies both models' rows in the same program and stores three more numbers than scores do. No logits are
stored, unless the caller keeps those of p for many candidates: then they are read, and only q is multiplied. It needs
smaller tiles than scores do. So both kernels add up the same units of a tile in the same order, and divide the
vocabulary into the same spans: a model's scores have the same bits whether it is scored alone or compared.

Σ |p - q| needs both normalizers before it can be added up. So for all columns ``reduce_spans`` scores each model and
keeps its logits in memory, some hundred rows at a time, and two more kernels read them:

    logits of p and q, their normalizers ──diverge_rows──▶ KL(p‖q), KL(q‖p), Σ |p - q|
    logits, largest of each span ──find_first_choices──▶ the first choices of a model
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from scoremode.head.budget import FIRST, free_on
from scoremode.head.chunked import Share, diverge_in_chunks, in_blocks, keep_own
from scoremode.head.columns import Partials, RowBlock, empty_partials
from scoremode.head.divergence import (
    DivergencePartials,
    Gather,
    Kept,
    empty_sums,
    gather_own,
    kept_block,
    log_totals,
)
from scoremode.head.first_choices import ABSENT
from scoremode.head.fused import (
    KernelOperands,
    Launch,
    Spans,
    absent_logits,
    join_numbers,
    launches,
    reduce_fused,
    reduce_side,
    tiles_for,
)
from scoremode.head.fused_kernels import COUNTS, DIVERGENCE_PLANES, LARGEST, diverge_spans, join_divergences
from scoremode.head.kept_kernels import diverge_rows, find_first_choices
from scoremode.head.matrix import Head

KEPT = 1 << 31  # most bytes of logits that are kept, of both models; with fewer, the products' last programs wait
SHARED_KEPT = 1 << 30  # the same on every rank, whatever memory is free there: ranks must divide rows equally


def _kl_alone(
    p: KernelOperands, q: KernelOperands, targets: Tensor, share: Share, x_p: Tensor | None = None
) -> tuple[DivergencePartials, Tensor]:
    """``x_p`` are p's logits (n, whole tiles), if they are in memory."""
    n, launch = len(targets), Launch.of(q, targets, share, DIVERGENCE_PLANES)
    of_p, strides_p, descriptors_p = p.matrices(), p.strides(), p.descriptors
    if x_p is not None:
        strides_p, descriptors_p = (x_p.stride(0), 0), p.tiles.fits(x_p)
        of_p = (TensorDescriptor.from_tensor(x_p, [p.tiles.rows, p.tiles.columns]) if descriptors_p else x_p, x_p)
    matrices = (*of_p, p.bias(), *q.matrices(), q.bias())
    sizes = (n, q.head.vocabulary, p.hidden.shape[1], q.hidden.shape[1], *strides_p, *q.strides())
    shaped = (p.head.scale, q.head.scale, p.head.softcap or 1.0, q.head.softcap or 1.0)
    options = launch.options | {"descriptors_p": descriptors_p, "descriptors_q": q.descriptors}
    options |= {"read_p": x_p is not None}
    options |= {f"{name}_p": value for name, value in p.shape_options().items()}
    options |= {f"{name}_q": value for name, value in q.shape_options().items()}
    kernel: Any = diverge_spans[launch.programs]
    kernel(*matrices, *launch.tensors, *sizes, q.head.first_id, *shaped, *launch.counts, **options)
    floats, ints = launch.numbers
    sums = [torch.empty(n, dtype=torch.float32, device=targets.device) for _ in range(5)]
    join: Any = join_divergences[(triton.cdiv(n, 32),)]
    join(floats, *sums, n, launch.spans.count, block_rows=32, block_spans=32, num_warps=4)
    return DivergencePartials(join_numbers(floats, ints, targets, q.head.first_id), *sums), launch.at_target


@dataclass(frozen=True, slots=True, eq=False)
class KeptLogits:
    """The logits of one model in memory, (n, whole tiles), and what ``reduce_spans`` found in them."""

    side: KernelOperands
    logits: Tensor
    launch: Launch
    partials: Partials

    @staticmethod
    def of(side: KernelOperands, targets: Tensor, share: Share = keep_own) -> KeptLogits:
        columns = Spans.of(side.head.vocabulary, side.tiles).tiles * side.tiles.columns
        logits = torch.empty(len(targets), columns, dtype=torch.float32, device=targets.device)
        return KeptLogits(side, logits, *reduce_side(side, targets, share, logits))

    def first_choices(self) -> Tensor:
        """Returns the keys (n, FIRST) of first_choices.py."""
        spans, tiles, n = self.launch.spans, self.side.tiles, len(self.logits)
        keys = torch.empty(n, FIRST, dtype=torch.int64, device=self.logits.device)
        sizes = (n, self.side.head.vocabulary, self.side.head.first_id, spans.tiles, spans.long, spans.count)
        division = {"span": tiles.span, "short": tiles.short, "tile_columns": tiles.columns}
        blocks = {"block_spans": triton.next_power_of_2(spans.count), "count": FIRST, "slots": 8}
        kernel: Any = find_first_choices[(n,)]
        kernel(self.logits, self.launch.numbers[0][LARGEST.value], keys, *sizes, **division, **blocks, num_warps=8)
        return keys


@dataclass(frozen=True, slots=True)
class SlicedSums(RowBlock):
    """What a slice of the vocabulary contributes, before it becomes ``DivergencePartials``."""

    q: Partials
    largest_p: Tensor
    total_p: Tensor
    sums: Tensor  # (n, 3) float64: Σ p · (log p - log q) + q - p, the same with p and q exchanged, Σ |p - q|
    first_p: Tensor
    first_q: Tensor
    logs: Tensor | None = None  # (n, 2) float64, log Σ exp(x) of p and q over all slices; None: this is all of them

    def partials(self) -> DivergencePartials:
        kl, kl_reverse, apart = self.sums.unbind(1)
        largest, totals = (self.largest_p, self.q.largest), (self.total_p.double(), self.q.total.double())
        logs = log_totals((*largest, *totals), gather_own) if self.logs is None else self.logs.unbind(1)
        above = [log - most.double() for log, most in zip(logs, largest, strict=True)]
        part_p, part_q = ((total.log() - over).exp() for total, over in zip(totals, above, strict=True))
        gap = above[0] - above[1]
        cross = _moved(kl + part_p - part_q, part_p, gap, totals[0])
        cross_q = _moved(kl_reverse + part_q - part_p, part_q, -gap, totals[1])
        return DivergencePartials(self.q, *largest, *totals, cross, cross_q, self.first_p, self.first_q, apart)


def _moved(sums: Tensor, part: Tensor, gap: Tensor, total: Tensor) -> Tensor:
    """Turns Σ p · (log p - log q) over a slice with the share ``part`` of p into ``DivergencePartials.cross``."""
    cross = torch.where(gap.isinf(), math.inf, (sums / part + gap) * total)  # the other model forbids the whole slice
    return torch.where(part > 0, cross, 0.0)


def _all_columns(
    p: KernelOperands, q: KernelOperands, targets: Tensor, share: Share, gather: Gather
) -> tuple[SlicedSums, Tensor]:
    kept_q, kept_p = KeptLogits.of(q, targets, share), KeptLogits.of(p, targets[:, :0])
    parts = kept_p.partials, kept_q.partials
    normalizers, logs = [number for side in parts for number in (side.largest, side.total)], None
    if gather is not gather_own:
        logs = torch.stack(log_totals((*(s.largest for s in parts), *(s.total for s in parts)), gather), 1)
        normalizers = [part for log in logs.unbind(1) for part in (log.float(), (log - log.float()).exp().float())]
    n, sums = len(targets), torch.empty(3, len(targets), dtype=torch.float64, device=targets.device)
    sizes = (q.head.vocabulary, kept_p.logits.shape[1], kept_q.logits.shape[1])
    options = {"chunk": 2048 if targets.is_cuda else 128, "forbids": p.head.bias is not None or q.head.bias is not None}
    kernel: Any = diverge_rows[(n,)]
    kernel(kept_p.logits, kept_q.logits, *normalizers, *sums, *sizes, **options, num_warps=8)
    first = kept_p.first_choices(), kept_q.first_choices()
    return SlicedSums(parts[1], parts[0].largest, parts[0].total, sums.T, *first, logs), kept_q.launch.at_target


def diverge_fused(
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    targets: Tensor,
    share: Share = keep_own,
    gather: Gather | None = None,
    kept: Kept | None = None,
) -> tuple[DivergencePartials, Tensor]:
    """Returns the partials of the same slice of two heads, and the targets' logits of q. See kernels.Diverge.

    Without ``gather`` only KL(p‖q) is measured. Logits of p are kept only then.
    """
    if not _fit((hidden_p, head_p), (hidden_q, head_q), together=gather is None):  # then three products are computed
        own_q, at_q = reduce_fused(hidden_q, head_q, targets, share)
        made, _ = diverge_in_chunks(hidden_p, head_p, hidden_q, head_q, targets, gather=gather, kept=kept)
        return replace(made, q=own_q), at_q
    targets, padded = targets.contiguous(), head_q.weight.shape[0]  # the padded size is equal on all ranks
    nothing = head_q.vocabulary == 0 or len(targets) == 0

    def sides(rows: slice, two_products: bool) -> tuple[KernelOperands, KernelOperands]:
        tiles_p, tiles_q = (tiles_for(head.weight, two_products) for head in (head_p, head_q))
        return KernelOperands.of(hidden_p[rows], head_p, tiles_p), KernelOperands.of(hidden_q[rows], head_q, tiles_q)

    def kl_alone(rows: slice) -> tuple[DivergencePartials, Tensor]:
        if nothing:
            own_q, at_target = empty_partials(hidden_q[rows], targets[rows]), share(absent_logits(targets[rows]))
            return DivergencePartials(own_q, *empty_sums(hidden_q[rows], torch.float32)), at_target
        p, q = sides(rows, two_products=True)
        if kept is None:
            return _kl_alone(p, q, targets[rows], share)
        alone = KernelOperands.of(hidden_p[rows], head_p, tiles_for(head_p.weight))
        x_p = kept_block(kept, (rows.start,), lambda: KeptLogits.of(alone, targets[rows, :0]).logits)
        return _kl_alone(p, q, targets[rows], share, x_p)

    if gather is None:
        tiles = tiles_for(head_q.weight, two_products=True)
        row_words = Spans.of(padded, tiles).count * (DIVERGENCE_PLANES + COUNTS.value + targets.shape[1])
        return in_blocks(kl_alone, launches(len(targets), row_words, tiles))
    told = gather

    def all_columns(rows: slice) -> tuple[SlicedSums, Tensor]:
        if nothing:
            return _no_columns(hidden_q[rows], targets[rows], share, told)
        return _all_columns(*sides(rows, two_products=False), targets[rows], share, told)

    step = max(1, _room(hidden_q.device, alone=gather is gather_own) // (8 * max(1, padded)) // 128) * 128
    sums, at_target = in_blocks(all_columns, [slice(i, i + step) for i in range(0, max(1, len(targets)), step)])
    return sums.partials(), at_target


def _room(device: torch.device, *, alone: bool) -> int:
    """Returns how many bytes of logits may be kept. Results have the same bits whatever it is."""
    if not alone or device.type != "cuda":
        return min(KEPT, SHARED_KEPT)
    return min(KEPT, free_on(device) // 4)


def _no_columns(hidden: Tensor, targets: Tensor, share: Share, gather: Gather) -> tuple[SlicedSums, Tensor]:
    """Returns what a slice of no ids contributes, or no rows. Asks other ranks as often as they ask."""
    own_q, at_target = empty_partials(hidden, targets), share(absent_logits(targets))
    lowest, _, total, *_ = empty_sums(hidden, torch.float32)
    logs = torch.stack(log_totals((lowest, lowest, total, total), gather), 1)
    first = torch.full((len(targets), FIRST), ABSENT, dtype=torch.int64, device=targets.device)
    sums = torch.zeros(len(targets), 3, dtype=torch.float64, device=targets.device)
    return SlicedSums(own_q, lowest, total, sums, first, first, logs), at_target


def _fit(*sides: tuple[Tensor, Head], together: bool) -> bool:
    """Can matrix units multiply both sides, and one kernel both if ``together``? float32 needs smaller tiles."""
    equal = all(hidden.dtype == head.weight.dtype for hidden, head in sides)
    return equal and (not together or len({hidden.dtype == torch.float32 for hidden, _ in sides}) == 1)
