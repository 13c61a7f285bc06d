"""Reads columns for charts block by block, as often as needed; a column is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.depth import Places
from scoremode.core.statistics.streams import Blocks, array_blocks, streamed_quantile
from scoremode.core.store.run import Run
from scoremode.values import Bools, Floats


@dataclass(frozen=True)
class Series:
    """One candidate: its value per target, and the groups of targets that are not independent of each other."""

    name: str
    values: Blocks
    places: Places

    @property
    def finite(self) -> StreamedColumn:
        """The values that can be drawn."""
        return StreamedColumn(self.values).where(np.isfinite)


class StreamedColumn:
    """Values that are read block by block.

    >>> some = StreamedColumn(lambda: [np.array([3.0, -1.0]), np.array([2.0])])
    >>> some.count, some.largest, some.where(lambda v: v > 0).quantile(0.5)
    (3, 3.0, 2.5)
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    @staticmethod
    def of(array: Floats) -> StreamedColumn:
        return StreamedColumn(lambda: array_blocks(array))

    @staticmethod
    def joined(*columns: StreamedColumn) -> StreamedColumn:
        return StreamedColumn(lambda: (block for column in columns for block in column.blocks()))

    def where(self, wanted: Callable[[Floats], Bools]) -> StreamedColumn:
        """Returns only the values for which ``wanted`` is true."""
        return StreamedColumn(lambda: (block[wanted(block)] for block in self.blocks()))

    def absolute(self) -> StreamedColumn:
        return StreamedColumn(lambda: map(np.abs, self.blocks()))

    @cached_property
    def _count_and_largest(self) -> tuple[int, float]:
        count, largest = 0, -np.inf
        for block in self.blocks():
            count, largest = count + len(block), max(largest, float(block.max(initial=-np.inf)))
        return count, largest

    @property
    def count(self) -> int:
        return self._count_and_largest[0]

    @property
    def largest(self) -> float:
        """The largest value; -inf if there are no values."""
        return self._count_and_largest[1]

    def quantile(self, fraction: float) -> float:
        """Returns a quantile, with the same bits as from ``numpy.quantile``; there must be at least one value."""
        return streamed_quantile(self.blocks(), self.count, fraction)


def delta_logprob(c: Comparison) -> Iterator[Floats]:
    """Yields the nats by which each token became likelier; NaN if both models give it probability zero."""
    sides = (run.scores.blocks("logprob") for run in (c.candidate, c.baseline))
    for (candidate,), (baseline,) in zip(*sides, strict=True):
        with np.errstate(invalid="ignore"):
            yield candidate - baseline


def surprise(run: Run) -> Iterator[Floats]:
    for (logprob,) in run.scores.blocks("logprob"):
        yield -logprob
