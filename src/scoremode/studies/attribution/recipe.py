"""A recipe from measured units: chosen on the first half of the windows, really built, measured on the second half.

The damage of a mixture is predicted as the sum of the damages that were measured for its units one by one. Choosing one
option per unit is then a knapsack problem, which SciPy's solver of integer programs (HiGHS) solves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.core.arguments import user_path
from scoremode.core.verbs.outputs import ANY, NEVER_REPLACED, check_output, write_files
from scoremode.errors import InputError, OptionError, print_line
from scoremode.studies.attribution.result import SEEN, CandidateDamage, Recipe
from scoremode.studies.attribution.swap_loop import Candidate, SwapJob, SwapMeasurement, record_number, stored_bits
from scoremode.studies.attribution.tool_recipes import LLM_COMPRESSOR, write_recipes
from scoremode.studies.attribution.units import Unit
from scoremode.studies.attribution.weight_formats.stored import Stored

BASELINE, FLAG = "baseline", "--write-recipe"
TOLERANCE = 1e-6  # a mixture may exceed the budget by this share, as the solver does
LARGE = 1e4  # the sum of all values that the solver sees: it tells values apart that differ by 1e-6 or more


@dataclass(frozen=True, slots=True)
class Budget:
    """What a mixture may cost: bits per weight, or KL."""

    bits: float | None = None
    kl: float | None = None

    def check(self, write_recipe: str | None) -> None:
        if self.bits is not None and self.kl is not None:
            raise OptionError("--bits-budget and --kl-budget were given together", fix="give one of them")
        for flag, budget in (("--bits-budget", self.bits), ("--kl-budget", self.kl)):
            if budget is not None and not (math.isfinite(budget) and budget >= 0):
                raise OptionError(f"{flag} is {budget}", fix="give a number that is not negative")
        if write_recipe is not None:
            if not self:
                raise OptionError("--write-recipe needs a budget", fix="give --bits-budget or --kl-budget")
            check_output(user_path(f"{write_recipe}{LLM_COMPRESSOR}"), FLAG, ANY)

    def __bool__(self) -> bool:
        return self.bits is not None or self.kl is not None

    @property
    def words(self) -> str:
        return f"{self.bits:g} bits per weight" if self.bits is not None else f"KL {self.kl:g}"


@dataclass(frozen=True, slots=True)
class Option:
    name: str  # the candidate that it comes from, or the baseline
    bits: float  # stored bits of the whole unit
    damage: float  # KL in nats per token, measured with only this unit swapped


def allocate(weights: Sequence[int], options: Sequence[Sequence[Option]], budget: Budget) -> list[Option]:
    """Chooses an option for each unit, given its number of weights and its options.

    With a budget of mean bits per weight over all units: the least damage. With one of KL: the fewest bits.

    >>> options = [[Option("4 bit", 40, 0.5), Option("8 bit", 80, 0.1)], [Option("4 bit", 40, 0.2)]]
    >>> [option.name for option in allocate([10, 10], options, Budget(bits=6))]
    ['8 bit', '4 bit']
    """
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array

    flat = [(unit, option) for unit, unit_options in enumerate(options) for option in unit_options]
    bits, damage = (np.array([getattr(option, name) for _, option in flat]) for name in ("bits", "damage"))
    total, unit = sum(weights), np.array([number for number, _ in flat])
    cost, value, limit = (bits / total, damage, budget.bits) if budget.kl is None else (damage, bits, budget.kl)
    assert limit is not None, "one of the two budgets"
    least = np.array([cost[unit == number].min() for number in range(len(options))])
    left = limit * (1 + TOLERANCE) - math.fsum(least)
    if left < 0:
        lowest = f"{math.fsum(least):.4g}"
        message = (
            f"--bits-budget is too small: the smallest options take {lowest} bits per weight"
            if budget.kl is None
            else f"--kl-budget is too small: the best options have a KL of {lowest}"
        )
        raise OptionError(message, fix="raise the budget, or add candidates")
    extra = cost - least[unit]
    solution = milp(
        value * LARGE / (np.abs(value).sum() or 1.0),
        integrality=np.ones(len(flat)),
        bounds=(0, extra <= left),
        constraints=[
            LinearConstraint(csr_array((np.ones(len(flat)), (unit, np.arange(len(flat))))), 1, 1),
            LinearConstraint(np.minimum(extra / (left or 1.0), 2)[None], -np.inf, 1.0),
        ],
        options={"mip_rel_gap": 0},
    )
    assert solution.x is not None, "the cheapest options are within the limit"
    return [flat[index][1] for index in np.flatnonzero(solution.x > 0.5)]


# ── from units to a mixture that was measured ────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Choices:
    """What a recipe chooses from: the candidates, the baseline's own weights, and the units."""

    candidates: Sequence[Candidate]
    own: Stored
    units: Sequence[Unit]
    model_type: str

    def allocate(self, budget: Budget, kl: Callable[[SwapJob], float]) -> list[Option]:
        """The best precision of each unit, given what each candidate's form of it does."""
        options = []
        for unit in self.units:
            options.append([Option(BASELINE, stored_bits(self.own, unit.tensors), 0.0)])
            for candidate in self.candidates:
                job = candidate.job(unit)
                options[-1].append(Option(candidate.name, stored_bits(candidate.weights.stored, unit.tensors), kl(job)))
                if not math.isfinite(options[-1][-1].damage):
                    raise OptionError(f"the KL of {job.words} is not finite", fix="leave the candidate out")
        return allocate([unit.weights for unit in self.units], options, budget)

    def check(self, budget: Budget) -> None:
        """Refuses, before anything is measured, a budget in bits that no choice meets."""
        if budget.bits is not None:
            self.allocate(budget, lambda _: 0.0)


def make_recipe(
    budget: Budget, choices: Choices, uniform: Sequence[CandidateDamage], measurement: SwapMeasurement
) -> Recipe:
    """Chooses a mixture and measures it."""
    cells = measurement.cells
    if not cells.targets[cells.half == 1].sum():
        raise InputError("one window cannot be divided into two halves for a recipe", fix="give a longer text")
    picked = choices.allocate(budget, lambda job: cells.mean(measurement.measure([job])[0].kl, SEEN).value)
    by_name = {candidate.name: candidate for candidate in choices.candidates}
    taken = {
        tensor: by_name.get(option.name)
        for unit, option in zip(choices.units, picked, strict=True)
        for tensor in unit.tensors
    }
    swapped = {tensor: candidate for tensor, candidate in taken.items() if candidate is not None}
    number = record_number("mixture", *(f"{tensor} {candidate.fingerprint}" for tensor, candidate in swapped.items()))
    job = SwapJob("the mixture", {tensor: candidate.name for tensor, candidate in swapped.items()}, number)
    stored = {t: choices.own[t] if candidate is None else candidate.weights.stored[t] for t, candidate in taken.items()}
    return Recipe(
        budget=budget.words,
        chosen={unit.name: option.name for unit, option in zip(choices.units, picked, strict=True)},
        bits_per_weight=math.fsum(option.bits for option in picked) / sum(unit.weights for unit in choices.units),
        predicted=math.fsum(option.damage for option in picked),
        damage=measurement.measure([job])[0],
        uniform=tuple(sorted(uniform, key=lambda candidate: candidate.bits_per_weight)),
        written=write_recipes(choices.model_type, stored),
    )


def write_tools(recipe: Recipe, prefix: str) -> None:
    texts = {user_path(f"{prefix}{tool.suffix}"): tool.text for tool in recipe.written}
    made = write_files(texts, FLAG, NEVER_REPLACED)
    print_line(
        f"scoremode: recipes written to {', '.join(map(str, made))}; tools round in their own ways: measure again"
    )
