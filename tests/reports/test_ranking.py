"""The order of candidates, which cannot be told apart (paired if arrays are available), and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.estimate import GroupSums
from scoremode.errors import RunError
from scoremode.reports.ranking import closest_first, p_value, pairs_tested, pareto_front, told_apart
from scoremode.values import Estimate
from tests.core.statistics.test_comparison import compared

N = 2000
GENERATOR = np.random.default_rng(11)
SHARED = GENERATOR.gamma(0.5, 0.1, N)  # the difficulty of a target for every candidate
BASE = -GENERATOR.exponential(2.0, N)


def candidate(name: str, level: float, own: float = 1e-4, seed: int = 0, **more: Any) -> Comparison:
    """A shared KL plus a level and a little noise per candidate; log-probabilities that decrease with it."""
    kl = SHARED + level + own * np.random.default_rng(seed).normal(size=N)
    return compared(BASE, BASE - kl, kl=kl, name=name, **more)


def test_the_closest_comes_first_with_its_ties() -> None:
    three = [candidate("c", 0.5), candidate("a", 0.0, seed=1), candidate("b", 0.0, seed=2)]
    (first, tied), (second, too), last = closest_first(three)
    assert (sorted([first, second]), tied, too, last) == ([1, 2], [second], [first], (0, []))
    assert closest_first([candidate("worse", 0.001, seed=1), candidate("better", 0.0)]) == [(1, []), (0, [])]
    assert closest_first([compared([-1.0], [-np.inf], name=name) for name in "ab"]) == []


def test_what_has_no_value_is_left_out_and_few_groups_or_blocks_tell_nothing_apart() -> None:
    infinite = candidate("infinite", 0.0)
    assert infinite.kl is not None
    infinite.kl[3] = np.inf
    assert closest_first([infinite, candidate("a", 0.0)]) == [(1, [])]
    group = np.zeros(N, np.int64)
    assert closest_first([candidate("a", 0.0, groups=group), candidate("b", 1.0, groups=group)]) == [(0, [1]), (1, [0])]
    blocks = {"stderr_groups": "blocks of 300 tokens of this one text"}
    found = [candidate("a", 0.0), candidate("b", 1.0)]
    found = [replace(c, baseline=replace(c.baseline, manifest={**c.baseline.manifest, **blocks})) for c in found]
    assert closest_first(found) == [(0, [1]), (1, [0])]


def test_candidates_of_different_plans_or_baselines_are_refused() -> None:
    with pytest.raises(RunError, match="different plans"):
        closest_first([candidate("a", 0.0), candidate("b", 0.0, groups=np.arange(N) // 2)])
    with pytest.raises(RunError, match="different baselines"):
        closest_first([candidate("a", 0.0), candidate("b", 0.0, model_fingerprint="beef")])


# ── how often equal candidates are told apart ────────────────────────────────────────────────────────────────────────
DRAWS = {2: 1500, 4: 1000, 8: 400}  # of texts, by the number of candidates


def drawn_p_values(candidates: int, documents: int, gap: float = 0.0) -> Iterator[list[float]]:
    """The p of every pair of candidates, text by text. The last candidate is worse by ``gap``, the others are equal.

    Documents differ in size and difficulty. Candidates share most of the difficulty, and some are noisier than others.
    """
    draws, random = DRAWS[candidates], np.random.default_rng([candidates, documents])
    sizes = random.lognormal(0.0, 0.5, documents)
    shared = random.gamma(0.5, 1.0, (draws, documents, 1))
    own = random.normal(size=(draws, documents, candidates)) * np.linspace(0.5, 1.5, candidates)
    means = shared + 0.2 * own + gap * (np.arange(candidates) == candidates - 1)
    for text in means * sizes[:, None]:
        found = []
        for i, j in combinations(range(candidates), 2):
            sums = GroupSums(documents)
            sums.add(sums.indices, text[:, i] - text[:, j], sizes)
            found.append(p_value(sums.estimate()))
        yield found


@pytest.mark.parametrize("documents", [6, 60])
@pytest.mark.parametrize("candidates", DRAWS)
def test_among_equal_candidates_a_difference_is_claimed_in_at_most_5_percent(candidates: int, documents: int) -> None:
    drawn = list(drawn_p_values(candidates, documents))
    most = 0.05 + 3 * (0.05 * 0.95 / len(drawn)) ** 0.5  # three standard errors of the simulation itself
    assert np.mean([any(told_apart(p)) for p in drawn]) <= most
    if (
        candidates > 2 and documents == 60
    ):  # pair by pair, as if it were the only one, it would be claimed far more often
        assert np.mean([min(p) <= 0.05 for p in drawn]) > 0.1


@pytest.mark.parametrize(("documents", "gap"), [(6, 3.0), (60, 0.3)])
def test_a_real_difference_is_still_found(documents: int, gap: float) -> None:
    with_last = [3 in pair for pair in combinations(range(4), 2)]
    drawn = [told_apart(p) for p in drawn_p_values(4, documents, gap)]
    assert np.mean([all(np.array(found)[with_last]) for found in drawn]) >= 0.9
    assert np.mean([any(~np.array(with_last) & found) for found in drawn]) <= 0.07


def test_a_difference_without_spread_is_certain_and_none_is_none() -> None:
    assert p_value(Estimate(0.1, 0.0, 10, 10, 9.0)) == 0.0
    assert p_value(Estimate(0.0, 0.0, 10, 10, 9.0)) == 1.0
    assert p_value(Estimate(0.1, None, 10, 3)) == 1.0
    assert told_apart([]) == []


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


def test_a_footnote_says_how_several_pairs_were_tested() -> None:
    three = [candidate(name, level) for name, level in (("a", 0.1), ("b", 0.2), ("c", 0.3))]
    assert [pairs_tested(three[:count]) for count in (0, 1, 2)] == ["", "", ""]
    assert pairs_tested(three) == "3 pairs tested together (Holm's method), at most 5 % false differences in all"
