"""The choice of precisions, against all mixtures counted out."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.errors import OptionError
from scoremode.studies.attribution.recipe import Allocation, Budget, Option, allocate

Problem = tuple[dict[str, int], dict[str, list[Option]]]


def every_mixture(problem: Problem) -> list[tuple[float, float]]:
    """(bits per weight, damage) of all mixtures."""
    weights, options = problem
    total = sum(weights.values())
    mixtures = itertools.product(*(options[unit] for unit in weights))
    return [(math.fsum(o.bits for o in m) / total, math.fsum(o.damage for o in m)) for m in mixtures]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    names = [f"layer {i}" for i in range(draw(st.integers(1, 5)))]
    weights = {name: draw(st.integers(1, 1000)) for name in names}
    damages = st.floats(0, 5, allow_subnormal=False) | st.sampled_from([0.0, 0.125, 1.0])
    options = {
        name: [
            Option(f"{i}", weights[name] * draw(st.sampled_from([2.5, 4.25, 4.5, 8.5, 16.0])), draw(damages))
            for i in range(draw(st.integers(1, 4)))
        ]
        for name in names
    }
    return weights, options


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(2, 17))
def test_no_mixture_within_the_bits_has_less_damage(problem: Problem, budget: float) -> None:
    allowed = [damage for bits, damage in every_mixture(problem) if bits <= budget * (1 + 1e-9)]
    if not allowed:
        with pytest.raises(OptionError, match="--bits-budget is too small"):
            allocate(*problem, bits_budget=budget)
        return
    found = allocate(*problem, bits_budget=budget)
    assert found.bits_per_weight <= budget * (1 + 1e-8)
    assert found.predicted == pytest.approx(min(allowed), rel=1e-8, abs=1e-12)
    assert found.gap == 0
    assert_consistent(problem, found)


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0, 8))
def test_no_mixture_within_the_damage_has_fewer_bits(problem: Problem, budget: float) -> None:
    allowed = [bits for bits, damage in every_mixture(problem) if damage <= budget * (1 + 1e-9)]
    if not allowed:
        with pytest.raises(OptionError, match="--kl-budget is too small"):
            allocate(*problem, kl_budget=budget)
        return
    found = allocate(*problem, kl_budget=budget)
    assert found.predicted <= budget * (1 + 1e-8)
    assert found.bits_per_weight == pytest.approx(min(allowed), rel=1e-8)
    assert_consistent(problem, found)


def assert_consistent(problem: Problem, found: Allocation) -> None:
    weights, options = problem
    assert list(found.chosen) == list(weights)
    assert all(option in options[unit] for unit, option in found.chosen.items())


def model(units: int, seed: int = 0) -> Problem:
    """Units as they are in a model: few sizes, damages over several orders of magnitude."""
    random = np.random.default_rng(seed)
    weights = {f"matrix {i}": int(random.choice([110_592, 331_776, 884_736])) for i in range(units)}
    damage = {unit: float(np.exp(random.normal(-6, 1.5))) for unit in weights}
    options = {
        unit: [
            Option(
                f"{bits} bit", weights[unit] * (bits + 0.5), damage[unit] * 4.0 ** (4 - bits) * random.uniform(0.7, 1.4)
            )
            for bits in (3, 4, 6, 8)
        ]
        + [Option("baseline", weights[unit] * 16, 0.0)]
        for unit in weights
    }
    return weights, options


@pytest.mark.parametrize("budget", [3.6, 4.5, 6.0, 12.0])
def test_a_model_of_210_matrices_is_solved_exactly_and_beats_the_uniform_choice(budget: float) -> None:
    weights, options = model(210)
    begin = time.perf_counter()
    found = allocate(weights, options, bits_budget=budget)
    assert time.perf_counter() - begin < 20
    assert found.gap == 0
    assert found.bits_per_weight <= budget * (1 + 1e-8)
    if budget == 4.5:
        assert found.predicted < sum(option[1].damage for option in options.values())


def test_a_mixture_that_exceeds_the_budget_by_less_than_the_solver_sees_is_not_chosen() -> None:
    options = {
        unit: [Option("low", 2.0, 0.5), Option("high", 4.0 + more, 0.0)] for unit, more in (("a", 0), ("b", 4e-7))
    }
    found = allocate({"a": 1, "b": 1}, options, bits_budget=4.0)
    assert (found.predicted, found.bits_per_weight <= 4.0) == (0.5, True)
    assert found.gap in (0, 0.5)  # what the solver knows of the mixture that it may not choose


def test_exactly_the_budget_is_allowed_and_damage_that_is_zero_costs_nothing() -> None:
    weights = {"a": 7, "b": 9}
    options = {unit: [Option("low", 4.1 * n, 0.5), Option("high", 8.1 * n, 0.0)] for unit, n in weights.items()}
    assert allocate(weights, options, bits_budget=8.1).predicted == 0
    assert allocate(weights, options, bits_budget=4.1).predicted == 1
    assert allocate(weights, options, kl_budget=0).bits_per_weight == pytest.approx(8.1)
    assert allocate(weights, options, kl_budget=0.5).bits_per_weight == pytest.approx((4.1 * 9 + 8.1 * 7) / 16)


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="smallest options take 4 bits per weight"):
        allocate({"a": 10}, {"a": [Option("4 bit", 40, 0.1)]}, bits_budget=1.0)
    with pytest.raises(OptionError, match="the KL of a is not finite"):
        allocate({"a": 1}, {"a": [Option("x", 4, math.inf)]}, bits_budget=4)
    for budget, says in ((Budget(bits=math.nan), "--bits-budget is nan"), (Budget(kl=-1.0), "--kl-budget is -1.0")):
        with pytest.raises(OptionError, match=says):
            budget.check(None)
