"""The choice of precisions, against all mixtures counted out."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scoremode.errors import OptionError
from scoremode.studies.attribution.recipe import Budget, Option, allocate

MORE = 1 + 2e-6  # what the solver may exceed a budget by

Problem = tuple[list[int], list[list[Option]]]


def cost_of(mixture: list[Option] | tuple[Option, ...], weights: list[int]) -> tuple[float, float]:
    """Bits per weight, and damage."""
    return math.fsum(o.bits for o in mixture) / sum(weights), math.fsum(o.damage for o in mixture)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    weights = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=5))
    damages = st.floats(0, 5, allow_subnormal=False) | st.sampled_from([0.0, 0.125, 1.0])
    return weights, [
        [
            Option(f"{i}", n * draw(st.sampled_from([2.5, 4.25, 4.5, 8.5, 16.0])), draw(damages))
            for i in range(draw(st.integers(1, 4)))
        ]
        for n in weights
    ]


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(2, 17), st.floats(0, 8), st.booleans())
def test_no_mixture_within_the_budget_is_better(problem: Problem, bits: float, kl: float, by_bits: bool) -> None:
    weights, options = problem
    budget, limit, own = (Budget(bits=bits), bits, 0) if by_bits else (Budget(kl=kl), kl, 1)
    every = [cost_of(mixture, weights) for mixture in itertools.product(*options)]
    allowed = [mixture[1 - own] for mixture in every if mixture[own] <= limit]
    if not any(mixture[own] <= limit * MORE for mixture in every):
        with pytest.raises(OptionError, match="budget is too small"):
            allocate(weights, options, budget)
        return
    assume(allowed)  # else it may be chosen, or not
    chosen = allocate(weights, options, budget)
    assert all(option in own for option, own in zip(chosen, options, strict=True))
    found = cost_of(chosen, weights)
    assert found[own] <= limit * MORE
    assert found[1 - own] <= min(allowed) * (1 + 1e-8) + 1e-12


@pytest.mark.parametrize("budget", [3.6, 4.5, 12.0])
def test_a_model_of_210_matrices_is_solved_and_beats_the_uniform_choice(budget: float) -> None:
    """Units as they are in a model: few sizes, damages over several orders of magnitude."""
    random = np.random.default_rng(0)
    weights = [int(n) for n in random.choice([110_592, 331_776, 884_736], 210)]
    damage = np.exp(random.normal(-6, 1.5, 210))
    options = [
        [
            *(Option(f"{b} bit", n * (b + 0.5), kl * 4.0 ** (4 - b) * random.uniform(0.7, 1.4)) for b in (3, 4, 6, 8)),
            Option("baseline", n * 16, 0.0),
        ]
        for n, kl in zip(weights, damage, strict=True)
    ]
    begin = time.perf_counter()
    bits, predicted = cost_of(allocate(weights, options, Budget(bits=budget)), weights)
    assert time.perf_counter() - begin < 20
    assert bits <= budget * MORE
    if budget == 4.5:
        assert predicted < sum(option[1].damage for option in options)


def test_exactly_the_budget_is_allowed_and_damage_that_is_zero_costs_nothing() -> None:
    weights = [7, 9]
    options = [[Option("low", 4.1 * n, 0.5), Option("high", 8.1 * n, 0.0)] for n in weights]
    names = {
        (bits, kl): [option.name for option in allocate(weights, options, Budget(bits, kl))]
        for bits, kl in ((8.1, None), (4.1, None), (None, 0.0), (None, 0.5))
    }
    assert list(names.values()) == [["high", "high"], ["low", "low"], ["high", "high"], ["high", "low"]]


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="smallest options take 4 bits per weight"):
        allocate([10], [[Option("4 bit", 40, 0.1)]], Budget(bits=1.0))
    for budget, says in ((Budget(bits=math.nan), "--bits-budget is nan"), (Budget(kl=-1.0), "--kl-budget is -1.0")):
        with pytest.raises(OptionError, match=says):
            budget.check(None)
