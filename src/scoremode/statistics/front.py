"""Which candidates are worth their size: the Pareto front of size and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence


def front(sizes: Sequence[float | None], costs: Sequence[float | None]) -> list[int]:
    """Indices of the candidates that no other one beats, from the smallest to the largest.

    One candidate beats another if it is at most as large and costs at most as much, and is better in one of the two.
    Candidates that are equal in both do not beat each other. A size or a cost that is missing or not finite is on no
    front.

    >>> front([8.5, 4.8, 4.9, 2.1], [0.001, 0.04, 0.05, 0.9])
    [3, 1, 0]
    """
    known = []
    for i, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        if size is not None and cost is not None and math.isfinite(size) and math.isfinite(cost):
            known.append((size, cost, i))
    found: list[int] = []
    best: tuple[float, float] | None = None
    for size, cost, i in sorted(known):
        if best is None or cost < best[1] or (size, cost) == best:
            found.append(i)
            best = (size, cost)
    return found
