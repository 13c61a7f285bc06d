"""The order of candidates, which cannot be told apart (paired if arrays are available), and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from scoremode.core.statistics.comparison import Comparison, comparison_statistics
from scoremode.core.statistics.estimate import GroupSums
from scoremode.errors import OptionError, RunError
from scoremode.reports.ranking import Ranked, closest, p_value, pareto_front, rank, told_apart
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


def places(found: list[Ranked]) -> list[tuple[int | None, str, tuple[str, ...]]]:
    return [(r.place, r.name, r.tied_with) for r in found]


def known(name: str, value: float | None, stderr: float | None = 1.0) -> dict[str, Any]:
    return {"name": name, "kl_mean": value, "kl_mean_stderr": stderr, "freedom": 100.0}


def test_paired_differences_tell_apart_what_two_errors_cannot() -> None:
    pair = [candidate("worse", 0.001, seed=1), candidate("better", 0.0, seed=2)]
    assert places(rank(pair)) == [(1, "better", ()), (2, "worse", ())]
    alone = [comparison_statistics(c) for c in pair]
    assert places(rank(alone)) == [(1, "better", ("worse",)), (1, "worse", ("better",))]


def test_values_and_errors_are_those_of_the_statistics_and_what_cannot_rank_is_refused() -> None:
    c = candidate("a", 0.0)
    s = comparison_statistics(c)
    assert rank([c]) == [Ranked(1, "a", s["kl_mean"], s["kl_mean_stderr"], ())]
    assert [r.place for r in rank([c, candidate("b", 0.0)])] == [1, 1]
    assert rank([]) == []
    with pytest.raises(OptionError, match="did you mean 'kl_mean'"):
        rank([known("a", 0.0)], by="kl_man")


def test_differences_within_their_error_share_a_place() -> None:
    same = [candidate(name, 0.0, seed=seed) for seed, name in enumerate("ab")] + [candidate("c", 0.5)]
    found = rank(same)
    assert [r.place for r in found] == [1, 1, 3]
    assert found[2].name == "c"
    assert found[0].tied_with == (found[1].name,)


def test_ties_do_not_chain() -> None:
    """a like b and b like c, but not a like c: c has a separate place, and says which one it is like."""
    assert places(rank([known("a", 0.0), known("b", 2.0), known("c", 4.0)])) == [
        (1, "a", ("b",)),
        (1, "b", ("a", "c")),
        (3, "c", ("b",)),
    ]


@pytest.mark.parametrize("by", ["ppl_ratio", "log_ppl_ratio", "delta_logprob_mean"])
@pytest.mark.parametrize("method", ["sliding-once", "mean-of-texts"])
def test_other_statistics_rank_too_and_better_comes_first(by: str, method: str) -> None:
    more: dict[str, Any] = {"method": method, "document": np.arange(N)}
    found = rank([candidate("worse", 0.01, seed=1, **more), candidate("better", 0.0, seed=2, **more)], by=by)
    assert places(found) == [(1, "better", ()), (2, "worse", ())]
    assert found[0].value is not None
    assert found[1].value is not None
    assert (found[0].value > found[1].value) == (by == "delta_logprob_mean")


def test_more_agreement_is_better() -> None:
    tops = [(np.zeros(N), (GENERATOR.random(N) < share).astype(int)) for share in (0.3, 0.1)]
    found = rank([candidate(name, 0.0, tops=t) for name, t in zip(("low", "high"), tops, strict=True)], by="same_top")
    assert places(found) == [(1, "high", ()), (2, "low", ())]


def test_what_has_no_value_stands_last_and_without_an_error_nothing_can_be_told_apart() -> None:
    infinite = candidate("infinite", 0.0)
    assert infinite.kl is not None
    infinite.kl[3] = np.inf
    assert places(rank([infinite, candidate("a", 0.0)])) == [(1, "a", ()), (None, "infinite", ())]
    found = rank([known("unmeasured", None, None), known("b", 9.0), known("a", 0.0)])
    assert places(found) == [(1, "a", ()), (2, "b", ()), (None, "unmeasured", ())]
    assert [r.place for r in rank([known("a", 0.0, None), known("b", 9.0)])] == [1, 1]
    group = np.zeros(N, np.int64)
    found = rank([candidate("a", 0.0, groups=group), candidate("b", 1.0, groups=group)])
    assert places(found) == [(1, "a", ("b",)), (1, "b", ("a",))]


def test_candidates_of_different_plans_or_baselines_are_refused() -> None:
    with pytest.raises(RunError, match="different plans"):
        rank([candidate("a", 0.0), candidate("b", 0.0, groups=np.arange(N) // 2)])
    with pytest.raises(RunError, match="different baselines"):
        rank([candidate("a", 0.0), candidate("b", 0.0, model_fingerprint="beef")])


def shifted(name: str, shift: float, *, kl: bool, seed: int = 0) -> Comparison:
    """Log-probabilities shifted by a level, up or down, plus a little noise."""
    moves = shift + 1e-3 * np.random.default_rng(seed).normal(size=N)
    return compared(BASE - 1, BASE - 1 - moves, kl=np.abs(moves) if kl else None, name=name)


def test_the_closest_by_ratio_is_the_nearest_to_1_on_either_side() -> None:
    assert closest([shifted("far below", -0.8, kl=False), shifted("near", 0.004, kl=False, seed=1)]) == [1]
    same = [shifted("above", 0.02, kl=False), shifted("far", 0.1, kl=False), shifted("below", -0.02, kl=False, seed=3)]
    assert sorted(closest(same)) == [0, 2]
    groups = np.arange(N) % 3
    few = [compared(BASE, BASE - step, groups=groups, name=str(step)) for step in (0.0, 0.5)]
    assert closest(few) == [0, 1], "too few groups tell nothing apart"


def test_the_closest_by_kl_comes_with_its_ties() -> None:
    three = [candidate("c", 0.5), candidate("a", 0.0, seed=1), candidate("b", 0.0, seed=2)]
    assert sorted(closest(three)) == [1, 2]
    assert closest(three[:2]) == [1]
    assert closest([compared([-1.0], [-np.inf], name=name) for name in "ab"]) == []


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


@pytest.mark.parametrize("kl", [True, False])
def test_blocks_of_one_text_tell_nothing_apart(kl: bool) -> None:
    found = [shifted("near", 0.004, kl=kl), shifted("far", 0.8, kl=kl, seed=1)]
    assert closest(found) == [0]
    blocks = {"stderr_groups": "blocks of 300 tokens of this one text"}
    found = [replace(c, baseline=replace(c.baseline, manifest={**c.baseline.manifest, **blocks})) for c in found]
    assert closest(found) == [0, 1]


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
