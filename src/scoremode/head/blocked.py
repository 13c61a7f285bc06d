"""Scores hidden states on a CPU: the product is computed in blocks, and each is reduced while it is still in the cache.

              columns of the product, one block at a time
            ┌─────────┬──────────┬──────────┬─────┬──────────┐
 rows of    │ targets │ ids 0 …  │          │  …  │    … ids │
 hidden     └─────────┴──────────┴──────────┴─────┴──────────┘
              read first ─▶ share ─▶ the rest counted and added up, block by block ─▶ Partials

A target's logit must be known before its rank can be counted, and it must have the same bits as the same logit in its
block. A matrix kernel may add in a different order for a different shape. So the targets' weights are the first
columns, and all blocks have the same shape: equal weights then give equal logits, if the library adds in one order in
all columns of a product (docs/scores.md, "The same bits").
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scoremode.head.budget import rows_of_workspace
from scoremode.head.chunked import Share, diverge_in_chunks, in_blocks, keep_own, reduce_in_chunks
from scoremode.head.columns import FAR_BELOW, LOWEST, Partials, empty_partials
from scoremode.head.divergence import (
    COPIES,
    DivergencePartials,
    Gather,
    Kept,
    kept_block,
    log_totals,
    moved_cross,
    sum_cross,
)
from scoremode.head.first_choices import LeadingChoices
from scoremode.head.matrix import Head

BLOCK_ROWS = 1024  # matrix kernels are fastest from about 512 rows on, and the weights are read less often
MOST_COLUMNS = 4096  # columns of a block; more would not make the product faster
FEW_ROWS = 128  # up to this number, blocks of columns cost more than they save
TIED_ROWS = 128  # rows whose logits are copied together to look for ties: half a MiB per 1,024 columns
CHUNK = 256  # the largest logit is found per chunk first, so that its position is searched in one chunk only
BLOCK_LOGITS = 1 << 20  # logits per block: 4 MiB. Smaller blocks lose more to call overhead than the cache saves
COPIED_WEIGHTS = 3 << 19  # most weights copied per block: 6 MiB
FAR_APART = 60.0  # nats between two shares of a block, beyond which the smaller one adds nothing
KEPT_WEIGHTS = 1 << 27  # exponentials of both models that a divergence keeps: 512 MiB


def reduce_blocked(hidden: Tensor, head: Head, targets: Tensor, share: Share = keep_own) -> tuple[Partials, Tensor]:
    """Returns the partials of a head's slice, and the targets' logits, on a CPU. See ``kernels.Reduce``."""
    if len(targets) <= FEW_ROWS:
        return reduce_in_chunks(hidden, head, targets, share)

    def reduce(rows: slice) -> tuple[Partials, Tensor]:
        plan = _plan(targets[rows], head, head.weight.shape[1], BLOCK_LOGITS, COPIED_WEIGHTS)
        side = _BlockedProduct(hidden[rows], head, targets[rows], plan, _SPACE)
        side.rank_against(share(side.target_logits()))
        return side.partials(_sums(side)), side.at_target

    return in_blocks(reduce, _row_blocks(targets, BLOCK_ROWS))


def diverge_blocked(
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    targets: Tensor,
    share: Share = keep_own,
    gather: Gather | None = None,
    kept: Kept | None = None,
) -> tuple[DivergencePartials, Tensor]:
    """Returns the partials of a slice of two heads, and the targets' logits of q, on a CPU. See ``kernels.Diverge``.

    Uses the blocks that ``reduce_blocked`` makes for q, so q's scores have the same bits.
    """
    if len(targets) <= FEW_ROWS:
        return diverge_in_chunks(hidden_p, head_p, hidden_q, head_q, targets, share, gather, kept)

    def diverge(rows: slice) -> tuple[DivergencePartials, Tensor]:
        plan = _plan(targets[rows], head_q, head_q.weight.shape[1], BLOCK_LOGITS, COPIED_WEIGHTS)
        p = _BlockedProduct(hidden_p[rows], head_p, targets[rows], plan, _SPACE_OF_P, kept, rows.start)
        q = _BlockedProduct(hidden_q[rows], head_q, targets[rows], plan, _SPACE)
        q.rank_against(share(q.target_logits()))
        return _diverge(p, q, gather), q.at_target

    return in_blocks(diverge, _row_blocks(targets, BLOCK_ROWS))


def _row_blocks(targets: Tensor, most: int) -> Iterator[slice]:
    """Yields blocks of rows that are scored together, of about equal size; at least one block, which may be empty.

    The blocks depend only on the shape of the targets, because tensor-parallel ranks with different slices must call
    ``share`` equally often.
    """
    n, k = targets.shape
    together = max(1, min(most, 4 * most // max(1, k)))
    blocks = max(1, -(-n // together))
    step = max(1, -(-n // blocks))
    for begin in range(0, max(1, n), step):
        yield slice(begin, begin + step)


class _Space(threading.local):
    """Buffers that a thread reuses for its next block and its next call: new memory costs page faults each time."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
                held = self._held[name, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


_SPACE, _SPACE_OF_P = _Space(), _Space()


@dataclass(frozen=True, slots=True)
class _ColumnBlock:
    """Columns ``begin .. end`` of the product: first the targets' columns (one per row and target), then one per id."""

    begin: int
    end: int
    fresh: int  # offset from ``begin`` of the first id that no earlier block contains


@dataclass(frozen=True, slots=True)
class _ColumnBlocks:
    """Blocks of one shape. The last block may overlap the one before it; the repeated columns are ignored."""

    lead: int  # columns of targets
    columns: int  # per block
    blocks: list[_ColumnBlock]

    @property
    def chunk(self) -> int:
        """Columns per chunk; a block consists of whole chunks."""
        return CHUNK if self.columns % CHUNK == 0 else self.columns

    @property
    def with_ids(self) -> list[int]:
        """Indices of the blocks that contain ids, not only targets."""
        return [i for i, block in enumerate(self.blocks) if block.fresh < self.columns]


def _plan(targets: Tensor, head: Head, depth: int, area: int, copied: int) -> _ColumnBlocks:
    lead = targets.numel()
    width = min(head.vocabulary, len(head.weight))
    if width == 0 or len(targets) == 0:
        return _ColumnBlocks(lead, 0, [])
    whole = lead + width
    most = max(CHUNK, min(MOST_COLUMNS, area // len(targets), copied // max(1, depth)) // CHUNK * CHUNK)
    # choose, of the sizes near the largest, the one that repeats the fewest columns
    columns = whole if whole <= most else min(range(most, most * 3 // 4 - 1, -CHUNK), key=lambda size: -whole % size)
    blocks = []
    for begin in range(0, whole, columns):
        early = min(begin, whole - columns)
        blocks.append(_ColumnBlock(early, early + columns, max(begin, min(lead, early + columns)) - early))
    return _ColumnBlocks(lead, columns, blocks)


class _BlockedProduct:
    """The product of some rows with one head, one block of columns at a time, with its ranks and first choices."""

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        targets: Tensor,
        plan: _ColumnBlocks,
        space: _Space,
        kept: Kept | None = None,
        first_row: int = 0,
    ) -> None:
        self.n, self.k = targets.shape
        self.kept, self.first_row = kept, first_row
        self.head, self.plan, self.space = head, plan, space
        self.weight = head.weight[: head.vocabulary]
        self.hidden = hidden.float()
        self.targets = targets - head.first_id
        self.inside = (self.targets >= 0) & (self.targets < len(self.weight))
        self.held = -1  # the block whose product is in the buffer

    def product(self, index: int) -> Tensor:
        """Returns all columns of one block, (n, columns)."""
        if self.kept is None:
            return self._compute(index)
        return kept_block(self.kept, (self.first_row, index), lambda: self._compute(index).clone())

    def _compute(self, index: int) -> Tensor:
        x = self.space("product", self.n, self.plan.columns)
        if self.held != index:
            weight, bias = self._weights(self.plan.blocks[index])
            torch.mm(self.hidden, weight.T, out=x)
            replace(self.head, weight=weight, bias=bias, vocabulary=len(weight)).shaped(x)
            self.held = index
        return x

    def _weights(self, block: _ColumnBlock) -> tuple[Tensor, Tensor | None]:
        lead, bias = self.plan.lead, self.head.bias
        ids = slice(max(0, block.begin - lead), max(0, block.end - lead))
        if block.begin >= lead and self.weight.dtype == torch.float32:
            return self.weight[ids], None if bias is None else bias[ids]
        chosen = self.targets.reshape(-1)[block.begin : block.end].clamp(0, len(self.weight) - 1)
        weight = self.space("weight", self.plan.columns, self.weight.shape[1])
        weight[: len(chosen)] = self.weight[chosen]
        weight[len(chosen) :] = self.weight[ids]
        return weight, None if bias is None else torch.cat([bias[chosen], bias[ids]])

    def target_logits(self) -> Tensor:
        """Returns the targets' logits (n, k); -inf for a target outside the slice."""
        flat = torch.empty(self.plan.lead)
        for index, block in enumerate(self.plan.blocks):
            if block.begin < self.plan.lead:
                column = torch.arange(block.begin, min(block.end, self.plan.lead))
                flat[column] = self.product(index)[column // self.k, column - block.begin]
        return flat.view(self.n, self.k).masked_fill_(~self.inside, float("-inf"))

    def rank_against(self, at_target: Tensor) -> None:
        """Prepares to count the ids that rank before these logits."""
        self.at_target = at_target
        self.above = torch.nextafter(at_target, torch.tensor(float("inf")))  # x > t is x >= the next float after t
        self.before = torch.zeros(self.n, self.k)  # counts in float32 are exact below 2**24 ids, and fastest
        self.ties_at_home = torch.zeros(self.plan.lead, dtype=torch.int64)
        self.largest = torch.full((self.n,), float("-inf"))
        if not self.plan.blocks:
            return
        self.best = torch.full((self.n, self.plan.chunk), float("-inf"))  # the chunk with the largest logit
        self.best_begin = torch.full((self.n,), self.plan.lead)  # its first column
        flat = self.targets.reshape(-1)
        begins = torch.tensor([block.begin + block.fresh for block in self.plan.blocks])
        home = torch.searchsorted(begins, flat + self.plan.lead, right=True) - 1
        home = home.masked_fill(~self.inside.reshape(-1), len(self.plan.blocks))
        self.at_home = torch.argsort(home, stable=True)  # the targets, sorted by the block that contains them
        self.homes = torch.searchsorted(home[self.at_home], torch.arange(len(self.plan.blocks) + 1)).tolist()

    def ids(self, index: int) -> Tensor:
        """Returns the logits (n, ids) of the ids that a block adds, and finds the largest of each chunk."""
        whole, fresh = self.product(index), self.plan.blocks[index].fresh
        if fresh:
            whole[:, :fresh] = float("-inf")
        self.chunks = whole.view(self.n, -1, self.plan.chunk)
        self.largest_in_chunks = torch.amax(self.chunks, 2)
        return whole[:, fresh:]

    def ranked_ids(self, index: int) -> Tensor:
        """Counts ranks among the ids that a block adds, and returns their logits (n, ids), which may be overwritten."""
        x, block, whole = self.ids(index), self.plan.blocks[index], self.product(index)
        at_home = self.at_home[self.homes[index] : self.homes[index + 1]]
        for at in torch.split(at_home, TIED_ROWS) if len(at_home) else ():
            self._count_ties(block, whole, at)
        self._choose(block.begin)
        # an equal logit ranks before the target if its id is lower; in the target's own block ``_count_ties`` decides
        limit = torch.where(self.targets >= block.end - self.plan.lead, self.at_target, self.above)
        counted = self.space("scratch", *x.shape)
        ones = self.space("ones", x.shape[1]).fill_(1.0)
        for j in range(self.k):
            # a product with ones is faster than sum(), and sums of whole numbers are exact in any order
            self.before[:, j] += torch.mv(torch.ge(x, limit[:, j : j + 1], out=counted), ones)
        return x

    def _choose(self, begin: int) -> None:
        """Stores the chunk with the largest logit so far, the first one on ties."""
        here, chunk = self.largest_in_chunks.max(1)
        better = (here > self.largest).nonzero()[:, 0]
        if len(better):
            chosen = chunk[better]
            self.best[better] = self.chunks[better, chosen]
            self.best_begin[better] = begin + self.plan.chunk * chosen
        torch.maximum(self.largest, here, out=self.largest)

    def partials(self, sums: _Sums) -> Partials:
        """Returns the partials of the slice, after all its blocks are counted."""
        if not self.plan.blocks:
            return empty_partials(self.hidden, self.targets)
        drop = sums.drop(self.largest)
        share = drop.exp()
        return Partials(
            largest=self.largest,
            total=(share * sums.total).sum(0).to(sums.total.dtype),
            weighted=(share * (sums.weighted + drop * sums.total)).sum(0).to(sums.total.dtype),
            where=self.best_begin + self.best.argmax(1) + self.head.first_id - self.plan.lead,
            before=self.before.long() + self.ties_at_home.view(self.n, self.k),
        )

    def _count_ties(self, block: _ColumnBlock, whole: Tensor, at: Tensor) -> None:
        """Counts equal logits of lower ids in the block with these targets; ``ids`` counts all other blocks."""
        x, place = whole[at // self.k], (self.targets.reshape(-1)[at] + self.plan.lead - block.begin)[:, None]
        wanted = self.at_target.reshape(-1)[at, None]
        itself = x.gather(1, place)
        # a target's logit exceeds itself only if the matrix kernel gave it different bits in the two places
        self.ties_at_home[at] -= (itself > wanted)[:, 0].long()
        equal = (x == wanted).sum(1, keepdim=True)
        tied = (equal > (itself == wanted)).nonzero()[:, 0]
        if len(tied):  # rare, so only these rows are compared again
            numbers = torch.arange(self.plan.columns)
            lower = (numbers < place[tied]) & (numbers >= block.fresh)
            self.ties_at_home[at[tied]] += (lower & (x[tied] == wanted[tied])).sum(1)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums with one line per block of columns, relative to the largest logit up to that block."""

    reference: Tensor  # (blocks, n) float32, finite
    total: Tensor  # (blocks, n), Σ exp(x - reference)
    weighted: Tensor  # (blocks, n), Σ exp(x - reference) · (x - reference)

    @staticmethod
    def zeros(blocks: int, n: int) -> _Sums:
        return _Sums(*torch.zeros(3, blocks, n))

    def drop(self, largest: Tensor) -> Tensor:
        """Returns how far each block's reference is below the largest logit overall, (blocks, n) in float64."""
        return _drop(self.reference, largest)


def _drop(reference: Tensor, largest: Tensor) -> Tensor:
    return (reference.double() - largest.double().clamp_min(LOWEST)).clamp_min(FAR_BELOW)


def _sums(side: _BlockedProduct) -> _Sums:
    """Counts the ranks in all blocks and adds up their exponentials, in float32."""
    with_ids = side.plan.with_ids
    sums = _Sums.zeros(len(with_ids), side.n)
    for line, index in enumerate(with_ids):
        _add_up(side, side.ranked_ids(index), sums, line)
    return sums


def _add_up(side: _BlockedProduct, x: Tensor, sums: _Sums, line: int) -> None:
    """Adds up the exponentials of one block into a line of ``sums``; overwrites the logits."""
    reference = torch.clamp_min(side.largest, LOWEST, out=sums.reference[line])
    below = x.sub_(reference[:, None])
    p = torch.exp(below, out=side.space("scratch", *x.shape))
    torch.sum(p, 1, out=sums.total[line])
    weighted = torch.sum(p.mul_(below), 1, out=sums.weighted[line])
    if math.isnan(float(weighted.sum())):  # a logit is -inf: 0 · -inf must count as 0, not NaN
        torch.sum(torch.exp(below, out=p).mul_(below.clamp_min_(FAR_BELOW)), 1, out=weighted)


def _diverge(p: _BlockedProduct, q: _BlockedProduct, gather: Gather | None) -> DivergencePartials:
    """Returns the partials of q and the sums of the divergence, which are in float64 as in divergence.py."""
    with_ids, whole = p.plan.with_ids, gather is not None
    choices = [LeadingChoices(p.n, p.plan.chunk) for _ in ((p, q) if whole else ())]
    largest_p = torch.full((p.n,), float("-inf"))
    sums_q, reference_p = _Sums.zeros(len(with_ids), q.n), torch.zeros(len(with_ids), p.n)
    total_p, total_q, cross, cross_q = torch.zeros(4, len(with_ids), p.n, dtype=torch.float64)
    weights = _KeptWeights(p, q, reference_p, sums_q.reference, gather)
    for line, index in enumerate(with_ids):
        x_p, x_q = p.ids(index), q.ranked_ids(index)
        begin = q.head.first_id + p.plan.blocks[index].begin - p.plan.lead
        for leading, side in zip(choices, (p, q), strict=False):
            leading.add(side.chunks, side.largest_in_chunks, begin, begin + p.plan.blocks[index].fresh)
        torch.maximum(largest_p, p.largest_in_chunks.amax(1), out=largest_p)
        most_p = torch.clamp_min(largest_p, LOWEST, out=reference_p[line])
        most_q = torch.clamp_min(q.largest, LOWEST, out=sums_q.reference[line])
        for rows in _steps(x_q):
            below_p, weight_p = _weigh(p, x_p[rows], most_p[rows])
            below_q, weight_q = _weigh(q, x_q[rows], most_q[rows])
            weights.keep(line, rows, weight_p, weight_q)
            torch.sum(weight_p, 1, out=total_p[line, rows])
            torch.sum(weight_q, 1, out=total_q[line, rows])
            gap = below_p.sub_(below_q)
            if whole:
                sum_cross(gap, weight_q, below_q, cross_q[line, rows]).neg_()
            sum_cross(gap, weight_p, gap, cross[line, rows])
        _add_up(q, x_q, sums_q, line)
    drop_p, drop_q = _drop(reference_p, largest_p), sums_q.drop(q.largest)
    whole_p, whole_q = ((drop.exp() * total).sum(0) for drop, total in ((drop_p, total_p), (drop_q, total_q)))
    sums = (largest_p, q.largest, whole_p, whole_q, moved_cross(drop_p, drop_q, total_p, cross))
    if gather is None:
        return DivergencePartials(q.partials(sums_q), *sums)
    apart = weights.sum_apart(*log_totals(sums, gather))
    first_p, first_q = (leading.choices() for leading in choices)
    cross_q = moved_cross(drop_q, drop_p, total_q, cross_q)
    return DivergencePartials(q.partials(sums_q), *sums, cross_q, first_p, first_q, apart)


def _steps(x: Tensor) -> Iterator[slice]:
    """Yields as many rows as are reduced at a time in float64."""
    step = rows_of_workspace(x.shape[1], 8 * COPIES, "cpu")
    for begin in range(0, len(x), step):
        yield slice(begin, min(begin + step, len(x)))


def _weigh(side: _BlockedProduct, x: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Computes ``x - most`` and its exponential, in float64, for some rows of a block."""
    below = side.space("below", *x.shape, dtype=torch.float64).copy_(x).sub_(most.double()[:, None])
    return below, torch.exp(below, out=side.space("weight", *x.shape, dtype=torch.float64))


class _KeptWeights:
    """The weights exp(x - reference) of both models, in float32, for Σ |p - q|: probabilities are known only at last.

    All weights of 1,024 rows may take a GiB, so only those of the first blocks are kept. The products of the others are
    computed again, with the same bits.
    """

    def __init__(
        self, p: _BlockedProduct, q: _BlockedProduct, reference_p: Tensor, reference_q: Tensor, gather: Gather | None
    ) -> None:
        self.sides, self.references = (p, q), (reference_p, reference_q)
        each = p.n * p.plan.columns  # weights per block and model
        self.blocks = 0 if gather is None else min(len(reference_p), KEPT_WEIGHTS // max(1, 2 * each))
        self.kept = [side.space("kept", self.blocks, p.n, p.plan.columns) for side in self.sides]

    def keep(self, line: int, rows: slice, *weights: Tensor) -> None:
        """Keeps the weights of some rows of a block, if there is room for it."""
        for buffer, weight in zip(self.kept, weights, strict=True) if line < self.blocks else ():
            buffer[line, rows, : weight.shape[1]].copy_(weight)

    def sum_apart(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Σ |p - q| (n,) in float64, given log Σ exp(x) of both models over the whole vocabulary."""
        p, q = self.sides
        apart = torch.zeros(p.n, dtype=torch.float64)
        p.held = q.held = -1  # the buffers of the products were overwritten
        for line, index in enumerate(p.plan.with_ids):
            # |a · weight_p - b · weight_q| is a · |weight_p - b / a · weight_q|, which takes one pass less
            log_a, log_b = (of[line].double() - log for of, log in zip(self.references, (log_p, log_q), strict=True))
            ratio = (log_b - log_a).clamp(-FAR_APART, FAR_APART).exp().float()
            scale = torch.maximum(log_a.exp(), log_b.exp() / ratio)  # the two differ if the ratio was clamped
            for rows, (weight_p, weight_q) in self._weights(line, index):
                gap = p.space("gap", *weight_p.shape)
                torch.addcmul(weight_p, weight_q, ratio[rows, None], value=-1, out=gap)
                apart[rows] += scale[rows] * gap.abs_().sum(1)
        return apart

    def _weights(self, line: int, index: int) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yields the weights of both models for some rows of a block."""
        fresh = self.sides[0].plan.blocks[index].fresh
        if line < self.blocks:
            whole = [buffer[line, :, : buffer.shape[2] - fresh] for buffer in self.kept]
            yield from ((rows, [buffer[rows] for buffer in whole]) for rows in _steps(whole[0]))
            return
        logits = [side.product(index)[:, fresh:] for side in self.sides]
        for rows in _steps(logits[0]):
            each = zip(self.sides, logits, self.references, strict=True)
            yield rows, [_weigh(side, x[rows], most[line, rows])[1].float() for side, x, most in each]
