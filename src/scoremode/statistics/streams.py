"""Sums and order statistics of columns that are read block by block: the very numbers that the whole column gives.

A sum has the bits of ``numpy.sum``, which adds in a tree whose shape follows from the length alone: the tree is walked
here, and NumPy adds its lower branches. A quantile needs the values at a few places of the sorted column. They are
found by reading it a few times: first how many values begin with which 16 bits, then the values of the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.values import Floats

Blocks = Callable[[], Iterable[Floats]]
"""A column: every call reads it from the beginning, block by block."""

LEAF = 1 << 16  # values that NumPy adds in one call; any number from 128 on gives the same sum
MOST = 1 << 20  # values that are sorted in memory
Keys = npt.NDArray[np.uint64]


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def streamed_sum(blocks: Iterable[Floats], n: int) -> float:
    """The sum of n values, to the bit as ``numpy.sum`` of the whole column.

    >>> streamed_sum([np.array([1.0, 2.0]), np.array([3.0])], 3)
    6.0
    """
    return float(_sum(_Taken(iter(blocks)), n))


def streamed_mean(blocks: Iterable[Floats], n: int) -> float:
    """The mean of n values, to the bit as ``numpy.mean`` of the whole column."""
    return streamed_sum(blocks, n) / n


def _sum(values: _Taken, n: int) -> Any:
    if n <= LEAF:
        return np.add.reduce(values.take(n))
    left = n // 2 - n // 2 % 8  # as numpy splits a long sum
    return _sum(values, left) + _sum(values, n - left)


class _Taken:
    """Values of blocks, taken in parts of any length."""

    def __init__(self, blocks: Iterator[Floats]) -> None:
        self._blocks, self._rest = blocks, np.zeros(0)

    def take(self, n: int) -> Floats:
        parts, missing = [], n
        while missing:
            if not len(self._rest):
                self._rest = next(self._blocks)
            parts.append(self._rest[:missing])
            self._rest = self._rest[missing:]
            missing -= len(parts[-1])
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])


# ── order statistics ─────────────────────────────────────────────────────────────────────────────────────────────────
def order_statistics(blocks: Blocks, n: int, places: Collection[int]) -> dict[int, float]:
    """What stands at these places (0 … n-1) when all n values are sorted. NaN is not allowed.

    >>> order_statistics(lambda: [np.array([3.0, 1.0]), np.array([2.0])], 3, [0, 2])
    {0: 1.0, 2: 3.0}
    """
    wanted = sorted(set(places))
    if n <= MOST:
        values = np.concatenate([np.zeros(0), *blocks()])
        values.partition(wanted)
        return {place: float(values[place]) for place in wanted}
    cells = {0: n}  # beginnings of keys that wanted values have, and how many values have them
    inside: dict[int, tuple[int, int]] = {place: (0, place) for place in wanted}  # place -> its cell, its place there
    shift = 64
    while shift and sum(cells.values()) > MOST:
        shift -= 16
        cells, inside = _narrowed(blocks, shift, cells, inside)
    if not shift:
        return {place: _values(np.array([cell], np.uint64))[0].item() for place, (cell, _) in inside.items()}
    found = _collected(blocks, shift, cells)
    return {place: float(found[cell][at]) for place, (cell, at) in inside.items()}


def streamed_quantile(blocks: Blocks, n: int, fraction: float) -> float:
    """A quantile of n values, 1 or more, to the bit as ``numpy.quantile`` of the whole column.

    >>> streamed_quantile(lambda: [np.array([3.0, 1.0]), np.array([2.0, 4.0])], 4, 0.5)
    2.5
    """
    at = fraction * (n - 1)
    below = int(at)
    above = min(below + 1, n - 1)
    found = order_statistics(blocks, n, {below, above})
    return float(np.quantile(np.array([found[below], found[above]]), at - below))  # as NumPy goes between two values


def _narrowed(
    blocks: Blocks, shift: int, cells: dict[int, int], inside: dict[int, tuple[int, int]]
) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """The cells of 16 bits more in which the wanted places lie."""
    counts = {cell: np.zeros(1 << 16, np.int64) for cell in cells}
    for block in blocks():
        keys = _keys(block) >> np.uint64(shift)
        for cell in counts:
            own = keys if shift == 48 else keys[keys >> np.uint64(16) == cell]
            counts[cell] += np.bincount((own & np.uint64(0xFFFF)).astype(np.int64), minlength=1 << 16)
    narrower, places = {}, {}
    for place, (cell, at) in inside.items():
        ends = np.cumsum(counts[cell])
        digit = int(np.searchsorted(ends, at, side="right"))
        size = int(counts[cell][digit])
        narrower[cell << 16 | digit] = size
        places[place] = cell << 16 | digit, at - int(ends[digit] - size)
    return narrower, places


def _collected(blocks: Blocks, shift: int, cells: Collection[int]) -> dict[int, Floats]:
    """The values of some cells, sorted."""
    parts: dict[int, list[Keys]] = {cell: [] for cell in cells}
    for block in blocks():
        keys = _keys(block)
        for cell, part in parts.items():
            own = keys[keys >> np.uint64(shift) == cell]
            if len(own):
                part.append(own)
    return {cell: _values(np.sort(np.concatenate(part))) for cell, part in parts.items()}


_SIGN = np.uint64(1 << 63)


def _keys(values: Floats) -> Keys:
    """Whole numbers in the order of the values; -0.0 counts as 0.0, as it does in a sort."""
    bits = (np.ascontiguousarray(values, np.float64) + 0.0).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _values(keys: Keys) -> Floats:
    """The values that have these keys."""
    return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)
