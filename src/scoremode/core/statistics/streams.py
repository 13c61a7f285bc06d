"""Computes sums and order statistics of columns that are read block by block, exactly as from the whole column.

A sum has the bits of ``numpy.sum``, which adds in a tree whose shape follows from the length alone. This file walks the
tree, and NumPy adds its lower branches. A long column is sorted in a temporary file, so that it takes no memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.values import BLOCK, Floats, release_read_blocks

Blocks = Callable[[], Iterable[Floats]]
"""Reads a column block by block; every call starts from the beginning."""

LEAF = 1 << 16  # values that NumPy adds in one call; any number from 128 on gives the same sum
MOST = 1 << 20  # values that are stored and sorted in memory

KL_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}
DELTA_P_QUANTILES = {
    **{"min": 0.0, "p001": 0.001, "p01": 0.01, "p05": 0.05, "p10": 0.1, "p25": 0.25, "median": 0.5},
    **{"p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0},
}


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def array_blocks(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yields an array in blocks. The memory pages of a mapped array are released while it is read."""
    for number, begin in enumerate(range(0, len(array), BLOCK)):
        yield array[begin : begin + BLOCK]
        release_read_blocks((array,), number)


def empty_column(n: int) -> Floats:
    """Returns space for n numbers; if there are many, in a temporary file, so that they need not stay in memory."""
    if n > MOST and hasattr(os, "posix_fallocate"):
        with contextlib.suppress(OSError), tempfile.TemporaryFile(prefix="scoremode-") as file:  # the disk may be full
            os.posix_fallocate(file.fileno(), 0, n * np.dtype(np.float64).itemsize)
            return np.memmap(file, np.float64, "r+").view(np.ndarray)
    return np.empty(n)


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class StreamedSum:
    """The sum of n values that arrive in blocks, with the same bits as ``numpy.sum`` of the whole column.

    >>> total = StreamedSum(3)
    >>> total.add(np.array([1.0, 2.0]))
    >>> total.add(np.array([3.0]))
    >>> total.value, total.mean
    (6.0, 2.0)
    """

    def __init__(self, n: int) -> None:
        self.n, self.value = n, 0.0
        self._parts: list[Floats] = []
        self._branches = _sum_branches(n)
        self._missing = next(self._branches)  # values until the branch that is being added is complete

    def add(self, block: Floats) -> None:
        while len(block):
            part, block = block[: self._missing], block[self._missing :]
            self._parts.append(part)
            self._missing -= len(part)
            if not self._missing:
                branch = part if len(self._parts) == 1 else np.concatenate(self._parts)
                self._parts = []
                try:
                    self._missing = self._branches.send(np.ascontiguousarray(branch))
                except StopIteration as complete:
                    self.value = float(complete.value)

    @property
    def mean(self) -> float:
        """The mean, with the same bits as ``numpy.mean``; there must be at least one value."""
        return self.value / self.n


class LlamacppMean:
    """The mean of n values that arrive in blocks, with its error by llama.cpp's rule, as if values were independent."""

    def __init__(self, n: int) -> None:
        self.n, self._values, self._squares = n, StreamedSum(n), StreamedSum(n)

    def add(self, block: Floats) -> None:
        self._values.add(block)
        self._squares.add(block**2)

    @property
    def mean(self) -> float:
        return self._values.mean if self.n else 0.0

    @property
    def variance(self) -> float:
        """The mean of the squares minus mean²; there must be at least one value."""
        return self._squares.mean - self.mean**2

    @property
    def error(self) -> float:
        """The error of the mean, sqrt(variance / (n - 1)); 0 for up to ten values, as in llama.cpp."""
        return math.sqrt(self.variance / (self.n - 1)) if self.n > 10 and self.variance > 0 else 0.0


def _sum_branches(n: int) -> Generator[int, Floats, Any]:
    """Yields how many values it needs next, is sent these values, and returns the sum of all n values."""
    if n <= LEAF:
        return np.add.reduce((yield n))
    left = n // 2 - n // 2 % 8  # numpy splits a long sum at the same place
    return (yield from _sum_branches(left)) + (yield from _sum_branches(n - left))


# ── order statistics ─────────────────────────────────────────────────────────────────────────────────────────────────
def order_statistics(blocks: Iterable[Floats], n: int, places: Collection[int]) -> dict[int, float]:
    """Returns the values at these places (0 … n-1) when all n values are sorted. NaN is not allowed.

    >>> order_statistics([np.array([3.0, 1.0]), np.array([2.0])], 3, [0, 2])
    {0: 1.0, 2: 3.0}
    """
    values, begin, wanted = empty_column(n), 0, sorted(set(places))
    for number, block in enumerate(blocks):
        values[begin : begin + len(block)] = block + 0.0 if n > MOST else block  # in a file, -0.0 becomes 0.0
        begin += len(block)
        release_read_blocks((values,), number)
    values.partition(wanted)
    return {place: float(values[place]) for place in wanted}


def quantiles(values: Floats, fractions: Mapping[str, float]) -> dict[str, float]:
    """Interpolates named quantiles between two values; infinite only if one of the two is, NaN if there are no values.

    >>> quantiles(np.array([0.0, 1.0, np.inf]), {"low": 0.25, "median": 0.5})
    {'low': 0.5, 'median': 1.0}
    """
    if not len(values):
        return dict.fromkeys(fractions, math.nan)
    last = len(values) - 1
    places = {name: math.floor(fraction * last) for name, fraction in fractions.items()}
    both = {min(place + more, last) for place in places.values() for more in (0, 1)}
    at = order_statistics(array_blocks(values), len(values), both)
    found = {}
    for name, place in places.items():
        below, above, share = at[place], at[min(place + 1, last)], fractions[name] * last - place
        if share == 0:  # a case of its own, because 0 · ∞ is NaN
            found[name] = below
        else:
            found[name] = below + share * (above - below) if math.isfinite(below) else math.inf
    return found


def streamed_quantile(blocks: Iterable[Floats], n: int, fraction: float) -> float:
    """Returns a quantile of n values (n ≥ 1), with the same bits as ``numpy.quantile`` of the whole column.

    >>> streamed_quantile([np.array([3.0, 1.0]), np.array([2.0, 4.0])], 4, 0.5)
    2.5
    """
    at = fraction * (n - 1)
    below = int(at)
    above = min(below + 1, n - 1)
    found = order_statistics(blocks, n, {below, above})
    return float(np.quantile(np.array([found[below], found[above]]), at - below))  # interpolates as NumPy does
