"""What the weights of each unit of a model do to its predictions: KL, change of log-probability, same first choice.

Sums over targets are kept for each cell: the targets of one group (groups.py) in one half of the windows. So every
number has a paired error over groups, sums and differences of units have one too, and a recipe that was chosen on the
first half of the windows can be measured on the second half, which it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.core.statistics.estimate import GroupSums, finite_or_none, transformed, with_error_fields
from scoremode.core.statistics.groups import grouping, weights_of
from scoremode.core.typed import typed
from scoremode.studies.attribution.tool_recipes import WrittenRecipe
from scoremode.values import Bools, Estimate, Floats, Ints, Range

GIGA = 1e9
HALVES = SEEN, HELD_OUT = "first", "second"  # of the windows
SMALLER = 0.995  # a uniform candidate is as large as a mixture from this share of its size on


# ── cells ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class Damage:
    """Sums over the targets of each cell, each target times its weight in the method's mean."""

    kl: Floats  # (cells,) of KL(baseline‖swapped), nats
    moved: Floats  # (cells,) of the change of log-probability, ln q - ln p
    same: Floats  # (cells,) of targets whose first choice is the same
    is_changed: bool = True  # False: the weights are equal, and nothing was computed

    def packed(self) -> bytes:
        return bytes([self.is_changed]) + np.stack([self.kl, self.moved, self.same]).astype("<f8").tobytes()

    @staticmethod
    def unpacked(record: bytes) -> Damage:
        kl, moved, same = np.frombuffer(record, "<f8", offset=1).reshape(3, -1).astype(np.float64)
        return Damage(kl, moved, same, bool(record[0]))


class Cells:
    """The targets of one group in one half of the windows are a cell; sums of them are kept for every unit."""

    def __init__(self, index: Ints, weight: Floats, groups: int, kind: str = "documents") -> None:
        """Cell (2 · group, and 1 more in the second half) and weight of every target."""
        self.kind, self._index, self._weight, count = kind, index, weight, 2 * max(1, groups)
        self.group, self.half = np.divmod(np.arange(count), 2)
        self.weight: Floats = np.bincount(index, weight, count).astype(np.float64)  # (cells,) sums
        self.targets = np.bincount(index, minlength=count)  # (cells,)

    @staticmethod
    def of(plan: Plan) -> Cells:
        groups, half = grouping(plan), (len(plan) + 1) // 2
        index = 2 * groups.of_target + (plan.target_window >= half)
        return Cells(index, weights_of(plan), groups.count, groups.kind)

    @property
    def count(self) -> int:
        return int(self.targets.sum())

    @property
    def groups(self) -> int:
        return len(np.unique(self.group[self.targets > 0]))

    def sums(self, kl: Floats, moved: Floats, same: Bools) -> Damage:
        """Adds up the columns of a swap, one line per target."""
        count = len(self.weight)
        columns = (kl, moved, same.astype(np.float64))
        sums = [np.bincount(self._index, x * self._weight, count).astype(np.float64) for x in columns]
        return Damage(sums[0], sums[1], sums[2])

    def unchanged(self) -> Damage:
        """The damage of weights that are equal to the baseline's: none."""
        nothing = np.zeros(len(self.weight))
        return Damage(nothing, nothing, self.weight.copy(), is_changed=False)

    def mean(self, sums: Floats, half: str | None = None, *, within: Range = "any") -> Estimate:
        """The mean over all targets, or over those of one half of the windows, with its error over groups."""
        used = (self.targets > 0) if half is None else (self.targets > 0) & (self.half == HALVES.index(half))
        numbers, index = np.unique(self.group[used], return_inverse=True)
        group_sums = GroupSums(len(numbers))
        group_sums.add(index, sums[used], self.weight[used])
        group_sums.n = int(self.targets[used].sum())
        return group_sums.estimate(within)

    def statistics(self, damage: Damage) -> dict[str, Estimate]:
        """The means that every damage has."""
        return {
            "kl": self.mean(damage.kl, within="positive"),
            "delta_logprob": self.mean(damage.moved),
            "same_top": self.mean(damage.same, within="share"),
        }


def fields_of(estimates: Mapping[str, Estimate | None]) -> dict[str, float | None]:
    """Estimates as fields for JSON, each with its error and bounds."""
    return {field: value for name, e in estimates.items() for field, value in with_error_fields(name, e).items()}


# ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class UnitDamage:
    """One unit of a candidate: its size, and what it does to the baseline in place of the baseline's own."""

    name: str  # layer 3; q_proj; layer 3 q_proj; embedding
    layer: int | None
    kind: str | None  # None: a whole layer
    weights: int
    format: str  # of its weights
    bits: float  # of the candidate, per weight
    bits_saved: float  # in all, against the baseline as it is stored
    damage: Damage


@dataclass(frozen=True, slots=True, eq=False)
class CandidateDamage:
    name: str
    bits_per_weight: float
    units: tuple[UnitDamage, ...]
    whole: Damage
    served: Damage | None = None  # as an engine serves it
    served_by: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a candidate's damage, KL in nats: parts + interaction = whole, whole + rest = served.

    Each line has a paired error: it is the mean of a difference per target, over groups.
    """

    parts: Estimate  # every unit swapped alone, added up
    interaction: Estimate  # the whole minus the sum: units that make each other's damage larger, or smaller
    whole: Estimate  # all weights swapped, everything else as in the baseline
    rest: Estimate | None  # the served model minus the whole: activations, the K/V cache, and kernels
    served: Estimate | None  # the candidate as an engine serves it

    @property
    def ratio(self) -> float | None:
        """The sum of parts over the whole; None if the whole is 0."""
        return self.parts.value / self.whole.value if self.whole.value else None

    def as_json(self) -> dict[str, float | None]:
        names = ("parts", "interaction", "whole", "rest", "served")
        return {
            "parts_over_whole": finite_or_none(self.ratio),
            **fields_of({name: getattr(self, name) for name in names}),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Which candidate each unit is taken from, what that was predicted to do, and what it did."""

    budget: str  # in words
    chosen: dict[str, str]  # unit -> candidate, or the baseline
    bits_per_weight: float
    predicted: float  # KL: the sum of the units' damages on the windows that it was chosen on
    damage: Damage  # of the mixture, really built
    uniform: tuple[CandidateDamage, ...]  # all candidates, with all of their weights, the smallest first
    written: tuple[WrittenRecipe, ...] = ()

    def measured(self, cells: Cells) -> Estimate:
        """KL of the mixture on windows that it was not chosen on."""
        return cells.mean(self.damage.kl, HELD_OUT, within="positive")

    def rival(self) -> CandidateDamage | None:
        """The smallest uniform candidate that is not smaller than the mixture."""
        return next((other for other in self.uniform if other.bits_per_weight >= self.bits_per_weight * SMALLER), None)

    def difference(self, cells: Cells, other: CandidateDamage) -> Estimate:
        """KL of the mixture minus that of a uniform candidate, on held-out windows: below 0, the mixture is better."""
        return cells.mean(self.damage.kl - other.whole.kl, HELD_OUT)

    def verdict(self, cells: Cells) -> str:
        rival = self.rival()
        if rival is None:
            return "no uniform candidate is as large as the mixture, so it has no rival"
        gap = self.difference(cells, rival)
        rival_text = f"{rival.name} ({rival.bits_per_weight:.2f} bits per weight) on held-out windows"
        if gap.value >= 0:
            return f"the mixture of {self.bits_per_weight:.2f} bits per weight does not beat {rival_text}"
        return f"the mixture beats {rival_text}, {'surely' if gap.high is not None and gap.high < 0 else 'not surely'}"

    def as_json(self, cells: Cells) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "bits_per_weight": self.bits_per_weight,
            "predicted_kl": self.predicted,
            **with_error_fields("measured_kl", self.measured(cells)),
            "verdict": self.verdict(cells),
            "uniform": [
                {
                    "name": candidate.name,
                    "bits_per_weight": candidate.bits_per_weight,
                    **with_error_fields("kl", cells.mean(candidate.whole.kl, HELD_OUT, within="positive")),
                    **with_error_fields("difference", self.difference(cells, candidate)),
                }
                for candidate in self.uniform
            ],
            "chosen": self.chosen,
            "tools": [{name: getattr(tool, name) for name in ("tool", "suffix", "command")} for tool in self.written],
        }


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """Where the damage of candidates is: per unit, with errors, and the account of the whole."""

    baseline: str
    by: str
    cells: Cells
    candidates: tuple[CandidateDamage, ...]
    noise: float | None  # mean KL of the baseline to itself: what is below cannot be told from rounding
    noise_perturbed: str | None  # how it was computed differently, or why there is none
    facts: Mapping[str, Any] = field(default_factory=dict)  # text, plan, engine: where the numbers come from
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None

    def __getitem__(self, candidate: int) -> CandidateDamage:
        return self.candidates[candidate]

    def __len__(self) -> int:
        return len(self.candidates)

    @typed
    def kl(self, one: UnitDamage) -> Estimate:
        return self.cells.mean(one.damage.kl, within="positive")

    @typed
    def kl_per_gigabit(self, one: UnitDamage) -> Estimate | None:
        """KL for each 10⁹ bits that the unit saves; None if it saves none."""
        if one.bits_saved <= 0:
            return None
        return transformed(self.kl(one), lambda x: x * GIGA / one.bits_saved, GIGA / one.bits_saved)

    @typed
    def statistics(self, damage: Damage) -> dict[str, float | None]:
        """KL, change of log-probability and share of same first choices, each with its error."""
        return fields_of(self.cells.statistics(damage))

    @typed
    def account(self, candidate: CandidateDamage) -> Account:
        cells, whole, served = self.cells, candidate.whole.kl, candidate.served
        parts = np.sum([np.zeros(len(cells.weight)), *(unit.damage.kl for unit in candidate.units)], axis=0)
        with np.errstate(invalid="ignore"):  # an infinite KL minus another is not known
            interaction = cells.mean(whole - parts)
            rest = None if served is None else cells.mean(served.kl - whole)
        return Account(
            parts=cells.mean(parts, within="positive"),
            interaction=interaction,
            whole=cells.mean(whole, within="positive"),
            rest=rest,
            served=None if served is None else cells.mean(served.kl, within="positive"),
        )

    @typed
    def share(self, one: UnitDamage, of: Account) -> float | None:
        """A unit's part of the sum of parts; None if that is infinite."""
        return finite_or_none(self.kl(one).value / of.parts.value) if of.parts.value else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "by": self.by,
            **self.facts,
            "targets": self.cells.count,
            "groups": self.cells.groups,
            "noise_kl_mean": self.noise,
            "noise_perturbed": self.noise_perturbed,
            "notes": list(self.notes),
            "candidates": [self._candidate_json(candidate, self.account(candidate)) for candidate in self.candidates],
            **({} if self.recipe is None else {"recipe": self.recipe.as_json(self.cells)}),
        }

    def _candidate_json(self, candidate: CandidateDamage, account: Account) -> dict[str, Any]:
        return {
            "name": candidate.name,
            "bits_per_weight": candidate.bits_per_weight,
            "notes": list(candidate.notes),
            "account": account.as_json(),
            "whole": self.statistics(candidate.whole),
            "served": None if candidate.served is None else self.statistics(candidate.served),
            "served_by": candidate.served_by,
            "units": [
                {
                    "unit": unit.name,
                    "layer": unit.layer,
                    "kind": unit.kind,
                    "weights": unit.weights,
                    "format": unit.format,
                    "bits": unit.bits,
                    "bits_saved": unit.bits_saved,
                    "changed": unit.damage.is_changed,
                    **self.statistics(unit.damage),
                    "share": self.share(unit, account),
                    **with_error_fields("kl_per_gigabit", self.kl_per_gigabit(unit)),
                }
                for unit in candidate.units
            ],
        }


def ordered(attribution: Attribution, units: Sequence[UnitDamage]) -> list[UnitDamage]:
    """Units by their KL, the largest first; of equal ones, those with other weights."""
    return sorted(units, key=lambda unit: (-attribution.kl(unit).value, not unit.damage.is_changed))
