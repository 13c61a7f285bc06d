"""The Pareto front, against its definition: every pair compared."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scoremode.core.statistics.ranking import pareto_front


def by_definition(sizes: list[float], costs: list[float]) -> set[int]:
    """Everything that is finite and that nothing else beats."""
    known = [i for i in range(len(sizes)) if math.isfinite(sizes[i]) and math.isfinite(costs[i])]

    def beats(i: int, j: int) -> bool:
        no_worse = sizes[i] <= sizes[j] and costs[i] <= costs[j]
        return no_worse and (sizes[i] < sizes[j] or costs[i] < costs[j])

    return {j for j in known if not any(beats(i, j) for i in known)}


@pytest.mark.parametrize("seed", range(50))
def test_the_front_is_what_the_definition_says(seed: int) -> None:
    chance = np.random.default_rng(seed)
    count = int(chance.integers(1, 30))
    sizes = chance.integers(1, 9, count).astype(float).tolist()  # few values: many ties
    costs = chance.choice([0.0, 0.1, 0.2, 0.5, 1.0, math.inf, math.nan], count).tolist()
    found = pareto_front(sizes, costs)
    assert set(found) == by_definition(sizes, costs)
    assert len(found) == len(set(found))
    assert [sizes[i] for i in found] == sorted(sizes[i] for i in found)
    assert [costs[i] for i in found] == sorted((costs[i] for i in found), reverse=True)


@pytest.mark.parametrize(
    ("sizes", "costs", "found"),
    [
        ([], [], []),
        ([4.0], [0.1], [0]),
        ([4.0], [math.inf], []),
        ([4.0, 8.0], [math.inf, 0.1], [1]),
        ([4.0, 8.0], [math.nan, 0.1], [1]),
        ([math.nan, 8.0, None], [0.1, 0.1, 0.1], [1]),
        ([4.0, 8.0], [None, 0.2], [1]),
        ([4.0, 4.0], [0.1, 0.1], [0, 1]),  # equal in both: neither beats the other
        ([4.0, 4.0], [0.2, 0.1], [1]),
        ([4.0, 8.0], [0.1, 0.1], [0]),
        ([8.0, 4.0, 6.0], [0.0, -0.5, -0.7], [1, 2]),
    ],
)
def test_ties_gaps_and_what_is_not_finite(
    sizes: list[float | None], costs: list[float | None], found: list[int]
) -> None:
    assert pareto_front(sizes, costs) == found
