"""A recipe from measured units: chosen on the first half of the windows, really built, measured on the second half.

The damage of a mixture is predicted as the sum of the damages that were measured for its units one by one. Choosing one
option per unit is then a knapsack problem, which SciPy's solver of integer programs (HiGHS) solves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scoremode.core.verbs.outputs import write_files
from scoremode.errors import InputError, OptionError, print_line
from scoremode.studies.attribution.result import SEEN, Recipe
from scoremode.studies.attribution.swap_loop import Candidate, Job, SwapMeasurement, record_number, stored_bits
from scoremode.studies.attribution.tool_recipes import Mixture, WrittenRecipe, write_recipes
from scoremode.studies.attribution.units import Unit
from scoremode.studies.attribution.weight_formats.matching import Stored
from scoremode.values import Floats, Ints

BASELINE = "baseline"
ROUNDING = 1e-9  # a sum may exceed the limit by this share: sums of floating-point numbers are not exact
TOLERANCE = 1e-6  # limits are scaled to 1, and the solver may exceed that by so much
LARGE = 1e4  # the sum of all values that the solver sees: it tells values apart that differ by 1e-6 or more


@dataclass(frozen=True, slots=True)
class Option:
    name: str  # the candidate that it comes from, or the baseline
    bits: float  # stored bits of the whole unit
    damage: float  # KL in nats per token, measured with only this unit swapped


@dataclass(frozen=True, slots=True)
class Allocation:
    chosen: Mapping[str, Option]  # by unit
    bits_per_weight: float
    predicted: float  # KL in nats per token: the sum of the damages
    gap: float  # the best mixture is better by at most this, in nats or in bits per weight; 0: this is the best


def allocate(
    weights: Mapping[str, int],
    options: Mapping[str, Sequence[Option]],
    *,
    bits_budget: float | None = None,
    kl_budget: float | None = None,
) -> Allocation:
    """Chooses an option for each unit. ``weights`` has the number of weights of each unit, ``options`` its options.

    With ``bits_budget``, mean bits per weight over all units: the least damage. With ``kl_budget``: the fewest bits.

    >>> options = {"a": [Option("4 bit", 40, 0.5), Option("8 bit", 80, 0.1)], "b": [Option("4 bit", 40, 0.2)]}
    >>> allocate({"a": 10, "b": 10}, options, bits_budget=6).chosen["a"].name
    '8 bit'
    """
    for unit, own in options.items():
        if not all(math.isfinite(option.damage) for option in own):
            raise OptionError(f"the KL of {unit} is not finite", fix="leave the candidate out")
    total, listed = sum(weights.values()), [list(options[unit]) for unit in weights]
    if bits_budget is not None:
        picked, gap = _solve(listed, "bits", "damage", bits_budget * total, total)
    else:
        assert kl_budget is not None, "one of the two budgets"
        picked, gap = _solve(listed, "damage", "bits", kl_budget, total)
        gap /= total
    chosen = dict(zip(weights, picked, strict=True))
    return Allocation(
        chosen,
        math.fsum(option.bits for option in picked) / total,
        math.fsum(option.damage for option in picked),
        gap,
    )


# ── the knapsack: the least value whose cost stays within a limit ────────────────────────────────────────────────────
def _solve(
    units: Sequence[Sequence[Option]], cost: str, value: str, limit: float, total: int
) -> tuple[list[Option], float]:
    """Returns the chosen option of each unit, and how much better the best choice may be at most."""
    least = [min(getattr(option, cost) for option in unit) for unit in units]
    left = limit + ROUNDING * abs(limit) - math.fsum(least)
    if left < 0:
        lowest = math.fsum(least)
        what = (
            f"--bits-budget is too small: the smallest options take {lowest / total:.4g} bits per weight"
            if cost == "bits"
            else f"--kl-budget is too small: the best options have a KL of {lowest:.4g}"
        )
        raise OptionError(what, fix="raise the budget, or add candidates")
    flat = [
        (number, option, getattr(option, cost) - low)
        for number, (unit, low) in enumerate(zip(units, least, strict=True))
        for option in unit
        if getattr(option, cost) - low <= left
    ]
    extra, values = (np.array(one) for one in zip(*((c, getattr(o, value)) for _, o, c in flat), strict=True))
    picked, bound = _chosen([number for number, *_ in flat], extra / left if left else extra, values, 1.0)
    if extra[picked].sum() > left:  # by less than the solver's tolerance
        picked, _ = _chosen([number for number, *_ in flat], extra / left, values, 1.0 - 2 * TOLERANCE)
    else:
        bound = math.fsum(values[picked])
    return [flat[i][1] for i in picked], math.fsum(values[picked]) - bound


def _chosen(unit: Sequence[int], cost: Floats, value: Floats, limit: float) -> tuple[Ints, float]:
    """Returns the indices of one option per unit with the least sum of values, and a bound below that sum."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array

    one_each = csr_array((np.ones(len(unit)), (unit, np.arange(len(unit)))))
    scale = LARGE / (np.abs(value).sum() or 1.0)
    found = milp(
        value * scale,
        integrality=np.ones(len(unit)),
        bounds=(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(cost[None], -np.inf, limit)],
        options={"mip_rel_gap": 0},
    )
    assert found.x is not None, "the cheapest options are within the limit"
    return np.flatnonzero(found.x > 0.5), float(found.mip_dual_bound) / scale


# ── from units to a mixture that was measured ────────────────────────────────────────────────────────────────────────
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
            folder = Path(write_recipe).expanduser().parent
            if not folder.is_dir():
                raise OptionError(f"there is no folder {folder} for --write-recipe", fix="make it first")

    def __bool__(self) -> bool:
        return self.bits is not None or self.kl is not None

    @property
    def words(self) -> str:
        return f"{self.bits:g} bits per weight" if self.bits is not None else f"KL {self.kl:g}"


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """What a recipe chooses from: the candidates by name, the baseline's own weights, and the units."""

    candidates: Mapping[str, Candidate]
    own: Stored
    units: Sequence[Unit]
    model_type: str

    def allocate(self, budget: Budget, kl: Callable[[Job], float]) -> Allocation:
        """The best precision of each unit, given what each candidate's form of it does."""
        options = {unit.name: [Option(BASELINE, stored_bits(self.own, unit.tensors), 0.0)] for unit in self.units}
        for unit in self.units:
            for name, candidate in self.candidates.items():
                bits = stored_bits(candidate.weights.stored, unit.tensors)
                options[unit.name].append(Option(name, bits, kl(candidate.job(unit))))
        weights = {unit.name: unit.weights for unit in self.units}
        return allocate(weights, options, bits_budget=budget.bits, kl_budget=budget.kl)

    def check(self, budget: Budget) -> None:
        """Refuses, before anything is measured, a budget in bits that no choice meets."""
        if budget.bits is not None:
            self.allocate(budget, lambda _: 0.0)

    def mixture_job(self, allocation: Allocation) -> Job:
        """The job of measuring the mixture: the tensors of every unit that is not the baseline's."""
        chosen = {unit.name: allocation.chosen[unit.name].name for unit in self.units}
        sources = {t: chosen[u.name] for u in self.units if chosen[u.name] != BASELINE for t in u.tensors}
        parts = [f"{tensor} {self.candidates[name].fingerprint}" for tensor, name in sources.items()]
        return Job("the mixture", sources, record_number("mixture", *parts))

    def written(self, allocation: Allocation) -> tuple[WrittenRecipe, ...]:
        weights = {BASELINE: self.own, **{name: one.weights.stored for name, one in self.candidates.items()}}
        chosen = {unit: weights[option.name] for unit, option in allocation.chosen.items()}
        parameters = {t: chosen[unit.name][t] for unit in self.units for t in unit.tensors}
        return tuple(write_recipes(Mixture(self.model_type, parameters)))


def make_recipe(budget: Budget, choices: RecipeOptions, measurement: SwapMeasurement) -> Recipe:
    """Chooses a mixture and measures it."""
    cells = measurement.cells
    if not cells.targets[cells.half == 1].sum():
        raise InputError("one window cannot be divided into two halves for a recipe", fix="give a longer text")

    allocation = choices.allocate(budget, lambda job: cells.mean(measurement.measure([job])[0].kl, SEEN).value)
    return Recipe(
        budget=budget.words,
        chosen={unit: option.name for unit, option in allocation.chosen.items()},
        bits_per_weight=allocation.bits_per_weight,
        predicted=allocation.predicted,
        gap=allocation.gap,
        damage=measurement.measure([choices.mixture_job(allocation)])[0],
        written=choices.written(allocation),
    )


def write_tools(recipe: Recipe, prefix: str) -> None:
    texts = {Path(f"{prefix}{one.suffix}").expanduser(): one.text for one in recipe.written}
    made = write_files(texts, "--write-recipe", "this recipe; what was measured is kept")
    print_line(
        f"scoremode: recipes written to {', '.join(map(str, made))}; tools round in their own ways: measure again"
    )
