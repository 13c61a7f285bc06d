"""A recipe from measured units: chosen on the first half of the windows, really built, measured on the second half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from scoremode.core.verbs.outputs import write_files
from scoremode.errors import InputError, OptionError, print_line
from scoremode.studies.attribution.bit_allocation import Allocation, Option, allocate
from scoremode.studies.attribution.result import SEEN, Recipe
from scoremode.studies.attribution.swap_loop import Candidate, Job, Stored, SwapMeasurement, record_number, stored_bits
from scoremode.studies.attribution.tool_recipes import Mixture, write_recipes
from scoremode.studies.attribution.units import Unit

BASELINE = "baseline"


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

    def texts(self, allocation: Allocation) -> list[dict[str, Any]]:
        weights = {BASELINE: self.own, **{name: one.weights.stored for name, one in self.candidates.items()}}
        chosen = {unit: weights[option.name] for unit, option in allocation.chosen.items()}
        parameters = {t: chosen[unit.name][t] for unit in self.units for t in unit.tensors}
        return [msgspec.to_builtins(one) for one in write_recipes(Mixture(self.model_type, parameters))]


def make_recipe(budget: Budget, choices: RecipeOptions, measurement: SwapMeasurement) -> dict[str, Any]:
    """Chooses a mixture and measures it; returns what the manifest keeps. Its sums are in the folder."""
    cells = measurement.cells.cells
    if not cells.targets[cells.half == 1].sum():
        raise InputError("one window cannot be divided into two halves for a recipe", fix="give a longer text")

    allocation = choices.allocate(budget, lambda job: cells.mean(measurement.measure([job])[0].kl, SEEN).value)
    job = choices.mixture_job(allocation)
    measurement.measure([job])
    return {
        "budget": budget.words,
        "chosen": {unit: option.name for unit, option in allocation.chosen.items()},
        "bits_per_weight": allocation.bits_per_weight,
        "predicted": allocation.predicted,
        "gap": allocation.gap,
        "record": job.number,
        "written": choices.texts(allocation),
    }


def write_tools(recipe: Recipe, prefix: str) -> None:
    texts = {Path(f"{prefix}{one.suffix}").expanduser(): one.text for one in recipe.written}
    made = write_files(texts, "--write-recipe", "this recipe; what was measured is kept")
    print_line(f"scoremode: recipes written to {', '.join(map(str, made))}")
