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


def test_ties_and_values_that_are_not_known() -> None:
    assert pareto_front([math.nan, 8.0, None, 4.0], [0.1, 0.1, 0.1, None]) == [1]
    assert pareto_front([4.0, 4.0], [0.1, 0.1]) == [0, 1], "equal in both: neither beats the other"
