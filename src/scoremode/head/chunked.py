"""Scores hidden states on any device, a few rows at a time: [tokens, vocabulary] is never in memory at once.

The logits of a chunk of rows are computed in float32 within a byte budget, then reduced to a few numbers per row
(columns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from scoremode.head.budget import rows_within
from scoremode.head.columns import Columns, Partials, RowBlock, finish, partials, target_logits
from scoremode.head.divergence import (
    Divergence,
    DivergencePartials,
    Gather,
    Kept,
    divergence_partials,
    finish_divergence,
    gather_own,
    kept_block,
)
from scoremode.head.matrix import Head

LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states (n, d) -> logits (n, vocabulary)."""

Block = TypeVar("Block", bound=RowBlock)

Share = Callable[[Tensor], Tensor]
"""Turns a slice's target logits (n, k) into those of the whole vocabulary. Tensor-parallel ranks exchange them here."""


def keep_own(at_target: Tensor) -> Tensor:
    """Returns the logits unchanged: the ``Share`` of a head that is not sliced, where nothing is exchanged."""
    return at_target


def in_blocks(reduce: Callable[[slice], tuple[Block, Tensor]], blocks: Iterable[slice]) -> tuple[Block, Tensor]:
    """Reduces one block of rows after the other; returns the partials and the targets' logits of all rows."""
    parts, logits = zip(*map(reduce, blocks), strict=True)
    return type(parts[0]).cat(parts), logits[0] if len(logits) == 1 else torch.cat(logits)


def score_rows(hidden: Tensor, logits_of: LogitsOf, targets: Tensor, vocabulary: int, budget: int = 0) -> Columns:
    """Scores every row of ``hidden`` (n, d) for its ``targets`` (n, k), with at most ``budget`` bytes of logits.

    This is for a head that is known only as a function. A head that is known as a matrix is scored faster (kernels.py).
    """
    rows = rows_within(budget, vocabulary, hidden.device.type)
    parts = [reduce_logits(logits_of(hidden[i : i + rows]), targets[i : i + rows]) for i in range(0, len(hidden), rows)]
    return Columns.cat(parts) if parts else columns_of_no_rows(targets)


def columns_of_no_rows(targets: Tensor) -> Columns:
    """Returns the columns of no rows, as ``reduce_logits`` makes them; ``targets`` is (0, k)."""
    return reduce_logits(torch.zeros(0, 1, device=targets.device), targets)


def reduce_logits(logits: Tensor, targets: Tensor) -> Columns:
    """Reduces a block of logits (n, vocabulary) to columns, in float32. May overwrite the block."""
    at_target = target_logits(logits, targets)
    return finish(partials(logits, targets, at_target), at_target)


def reduce_in_chunks(
    hidden: Tensor, head: Head, targets: Tensor, share: Share = keep_own, budget: int = 0, one_pass: bool = True
) -> tuple[Partials, Tensor]:
    """Returns the partials of a head's slice, and the targets' logits, on any device. See ``kernels.Reduce``."""

    def reduce(rows: slice) -> tuple[Partials, Tensor]:
        x = head.logits(hidden[rows])  # these logits are in memory only during this call
        at_target = share(target_logits(x, targets[rows], head.first_id))
        return partials(x, targets[rows], at_target, head.first_id, one_pass), at_target

    return in_blocks(reduce, _chunks(hidden, head, budget))


def diverge_in_chunks(
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    targets: Tensor,
    share: Share = keep_own,
    gather: Gather | None = None,
    kept: Kept | None = None,
    budget: int = 0,
    one_pass: bool = True,
) -> tuple[DivergencePartials, Tensor]:
    """Returns partial sums over one slice of the vocabulary, for two heads p and q, and q's logits of the targets.

    See ``kernels.Diverge``."""

    def diverge(rows: slice) -> tuple[DivergencePartials, Tensor]:
        x_p = kept_block(kept, (rows.start,), lambda: head_p.logits(hidden_p[rows]))
        x_q = head_q.logits(hidden_q[rows])
        at_q = share(target_logits(x_q, targets[rows], head_q.first_id))
        return divergence_partials(x_p, x_q, targets[rows], at_q, head_q.first_id, one_pass, gather), at_q

    # Chunks are sized by q: it is padded equally on all ranks, and a stored p is not. The products of q then have the
    # same shape as in ``reduce_in_chunks``; a matrix kernel may add in a different order for a different shape.
    return in_blocks(diverge, _chunks(hidden_q, head_q, budget))


def diverge_from_logits(
    hidden_p: Tensor, head_p: Head, hidden_q: Tensor, logits_of_q: LogitsOf, targets: Tensor, budget: int = 0
) -> Divergence:
    """Computes a divergence of p from q; ``logits_of_q`` makes logits from q's hidden states."""
    step = rows_within(budget, head_p.vocabulary, hidden_q.device.type)
    parts = []
    for rows in (slice(i, i + step) for i in range(0, max(1, len(hidden_q)), step)):
        x_q = logits_of_q(hidden_q[rows])[:, : head_p.vocabulary]
        x_p, at_q = head_p.logits(hidden_p[rows]), target_logits(x_q, targets[rows])
        made = divergence_partials(x_p, x_q, targets[rows], at_q, gather=gather_own)
        parts.append(finish_divergence(made, at_q))
    return Divergence.cat(parts)


def diverge_logits(hidden_p: Tensor, head_p: Head, logits_q: Tensor, targets: Tensor, budget: int = 0) -> Divergence:
    """Computes a divergence from q's logits (n, vocabulary), which may be overwritten."""
    return diverge_from_logits(hidden_p, head_p, logits_q, lambda logits: logits, targets, budget)


def _chunks(hidden: Tensor, head: Head, budget: int) -> Iterator[slice]:
    """Yields chunks of rows; at least one, which may be empty, so that all ranks call ``share`` equally often."""
    step = rows_within(budget, max(1, head.weight.shape[0]), hidden.device.type)
    for begin in range(0, max(1, len(hidden)), step):
        yield slice(begin, begin + step)
