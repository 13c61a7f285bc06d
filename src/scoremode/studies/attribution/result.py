"""What the weights of each unit of a model do to its predictions: KL, change of log-probability, same first choice.

Sums over targets are kept for each cell: the targets of one group (groups.py) in one half of the windows. So every
number has a paired error over groups, sums and differences of units have one too, and a recipe that was chosen on the
first half of the windows can be measured on the second half, which it has not seen.

An attribution is as its manifest has it, but for sums: there, these are numbers of records (swap_loop.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from scoremode.core.disk.manifests import Count, Text
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import measured
from scoremode.core.statistics.estimate import GroupSums, finite_or_none, transformed, with_error_fields
from scoremode.core.statistics.groups import grouping, weights_of
from scoremode.core.statistics.statistic import Statistic
from scoremode.studies.attribution.tool_recipes import WrittenRecipe
from scoremode.values import Bools, Estimate, Floats, Ints, Range

GIGA = 1e9
HALVES = SEEN, HELD_OUT = "first", "second"  # of the windows
SMALLER, LARGER = 0.995, 1.02  # a uniform candidate has the size of a mixture within these factors


# ── cells ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Damage:
    """Sums over the targets of each cell, each target times its weight in the method's mean."""

    def __init__(self, kl: Floats, moved: Floats, same: Floats, is_changed: bool = True, number: int = 0) -> None:
        self.kl = kl  # (cells,) of KL(baseline‖swapped), nats
        self.moved = moved  # (cells,) of the change of log-probability, ln q - ln p
        self.same = same  # (cells,) of targets whose first choice is the same
        self.is_changed = is_changed  # False: the weights are equal, and nothing was computed
        self.number = number  # of its record

    def packed(self) -> bytes:
        return bytes([self.is_changed]) + np.stack([self.kl, self.moved, self.same]).astype("<f8").tobytes()


class Cells:
    """The targets of one group in one half of the windows are a cell; sums of them are kept for every unit."""

    def __init__(self, group: Ints, half: Ints, weight: Floats, targets: Ints) -> None:
        self.group = group  # (cells,) 0, 1, …
        self.half = half  # (cells,) 0: in the first half of the windows
        self.weight = weight  # (cells,) sum of the targets' weights
        self.targets = targets  # (cells,)

    @property
    def count(self) -> int:
        return int(self.targets.sum())

    @property
    def groups(self) -> int:
        return len(np.unique(self.group[self.targets > 0]))

    def mean(self, sums: Floats, half: str | None = None, *, within: Range = "any") -> Estimate:
        """The mean over all targets, or over those of one half of the windows, with its error over groups."""
        used = (self.targets > 0) if half is None else (self.targets > 0) & (self.half == HALVES.index(half))
        numbers, index = np.unique(self.group[used], return_inverse=True)
        found = GroupSums(len(numbers))
        found.add(index, sums[used], self.weight[used])
        found.n = int(self.targets[used].sum())
        return found.estimate(within)

    def damage(self, record: bytes, number: int = 0) -> Damage:
        """The sums in a record. ValueError if they are not those of these cells."""
        if len(record) != 1 + 24 * len(self.weight):
            raise ValueError("a record has other cells than its plan")
        kl, moved, same = np.frombuffer(record, "<f8", offset=1).reshape(3, -1).astype(np.float64)
        return Damage(kl, moved, same, bool(record[0]), number)

    def unchanged(self) -> Damage:
        """The damage of weights that are equal to the baseline's: none."""
        nothing = np.zeros(len(self.weight))
        return Damage(nothing, nothing, self.weight.copy(), is_changed=False)


class PlanCells(Cells):
    """The cells of a plan, and the cell and weight of every target."""

    def __init__(self, plan: Plan) -> None:
        groups, half = grouping(plan), (len(plan) + 1) // 2
        self.kind = groups.kind
        self._index: Ints = 2 * groups.of_target + (plan.target_window >= half)
        self._weight = weights_of(plan)
        numbers = np.arange(2 * max(1, groups.count))
        super().__init__(
            numbers // 2,
            numbers % 2,
            np.bincount(self._index, self._weight, len(numbers)).astype(np.float64),
            np.bincount(self._index, minlength=len(numbers)),
        )

    def sums(self, kl: Floats, moved: Floats, same: Bools) -> Damage:
        """Adds up the columns of a swap, one line per target."""
        columns, count = (kl, moved, same), len(self.weight)
        sums = [np.bincount(self._index, x * self._weight, count).astype(np.float64) for x in columns]
        return Damage(sums[0], sums[1], sums[2])


# ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────────
OF_DAMAGE = (
    Statistic("kl", "KL(baseline‖swapped), nats", lambda damage: damage.kl, range="positive"),
    Statistic("delta_logprob", "change of log-probability, nats", lambda damage: damage.moved),
    Statistic("same_top", "share of same first choices", lambda damage: damage.same, range="share"),
)
"""The means over cells that every damage has."""


class UnitDamage(msgspec.Struct, frozen=True, eq=False):
    """One unit of a candidate: its size, and what it does to the baseline in place of the baseline's own."""

    name: Text  # layer 3; q_proj; layer 3 q_proj; embedding
    layer: Count | None
    kind: str | None  # None: a whole layer
    weights: Count
    format: str  # of its weights
    bits: float  # of the candidate, per weight
    bits_saved: float  # in all, against the baseline as it is stored
    damage: Damage = msgspec.field(name="record")


class CandidateDamage(msgspec.Struct, frozen=True, eq=False):
    name: Text
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

    def as_json(self) -> dict[str, Any]:
        names = ("parts", "interaction", "whole", "rest", "served")
        lines = (with_error_fields(name, getattr(self, name)) for name in names)
        return {"parts_over_whole": self.ratio, **{name: value for line in lines for name, value in line.items()}}


def account_of(cells: Cells, parts: Sequence[Damage], whole: Damage, served: Damage | None = None) -> Account:
    """The account of KL.

    >>> cells = Cells(np.arange(6), np.zeros(6, int), np.ones(6), np.ones(6, int))
    >>> one, both = (Damage(x, x, x) for x in (np.arange(6) / 10, np.arange(6) / 4))
    >>> account_of(cells, [one, one], both).interaction
    0.125 ± 0.038
    """
    total = np.sum([part.kl for part in parts], axis=0) if parts else np.zeros(len(cells.weight))
    with np.errstate(invalid="ignore"):  # an infinite KL minus another is not known
        interaction = cells.mean(whole.kl - total)
        rest = None if served is None else cells.mean(served.kl - whole.kl)
    return Account(
        parts=cells.mean(total, within="positive"),
        interaction=interaction,
        whole=cells.mean(whole.kl, within="positive"),
        rest=rest,
        served=None if served is None else cells.mean(served.kl, within="positive"),
    )


class Recipe(msgspec.Struct, frozen=True, eq=False):
    """Which candidate each unit is taken from, what that was predicted to do, and what it did."""

    budget: Text  # in words
    chosen: dict[str, str]  # unit -> candidate, or the baseline
    bits_per_weight: float
    predicted: float  # KL: the sum of the units' damages on the windows that it was chosen on
    gap: float  # the best mixture is predicted to be better by at most this; 0: this is the best
    damage: Damage = msgspec.field(name="record")  # of the mixture, really built
    uniform: tuple[CandidateDamage, ...] = ()  # all candidates, with all of their weights
    written: tuple[WrittenRecipe, ...] = ()

    def measured(self, cells: Cells) -> Estimate:
        """KL of the mixture on windows that it was not chosen on."""
        return cells.mean(self.damage.kl, HELD_OUT, within="positive")

    def rival(self) -> CandidateDamage | None:
        """The smallest uniform candidate that is not smaller than the mixture."""
        large = [one for one in self.uniform if one.bits_per_weight >= self.bits_per_weight * SMALLER]
        return min(large, key=lambda one: one.bits_per_weight, default=None)

    def difference(self, cells: Cells, other: CandidateDamage) -> Estimate:
        """KL of the mixture minus that of a uniform candidate, on held-out windows: below 0, the mixture is better."""
        return cells.mean(self.damage.kl - other.whole.kl, HELD_OUT)

    def verdict(self, cells: Cells) -> str:
        rival = self.rival()
        if rival is None:
            return "no uniform candidate is as large as the mixture, so it has no rival"
        found = self.difference(cells, rival)
        named = f"{rival.name} ({rival.bits_per_weight:.2f} bits per weight)"
        if found.value >= 0 and rival.bits_per_weight > LARGER * self.bits_per_weight:
            return f"no uniform candidate has the size of the mixture; the next larger one, {named}, has less KL"
        if found.value >= 0:
            return f"the mixture does not beat {named} on held-out windows"
        if found.high is None:
            return f"the mixture beats {named} on held-out windows; there is too little text for an error"
        sure = "surely" if found.high < 0 else "but not surely"
        return f"the mixture beats {named} on held-out windows, {sure}"

    def as_json(self, cells: Cells) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "bits_per_weight": self.bits_per_weight,
            "predicted_kl": self.predicted,
            "gap": self.gap,
            **with_error_fields("measured_kl", self.measured(cells)),
            "verdict": self.verdict(cells),
            "uniform": [
                {
                    "name": one.name,
                    "bits_per_weight": one.bits_per_weight,
                    **with_error_fields("kl", cells.mean(one.whole.kl, HELD_OUT, within="positive")),
                    **with_error_fields("difference", self.difference(cells, one)),
                }
                for one in sorted(self.uniform, key=lambda one: one.bits_per_weight)
            ],
            "chosen": dict(self.chosen),
            "tools": [{name: getattr(one, name) for name in ("tool", "suffix", "command")} for one in self.written],
        }


class Attribution(msgspec.Struct, frozen=True, eq=False):
    """Where the damage of candidates is: per unit, with errors, and the account of the whole."""

    baseline: Text
    by: Text
    cells: Cells
    candidates: tuple[CandidateDamage, ...]
    noise: float | None  # mean KL of the baseline to itself: what is below cannot be told from rounding
    noise_perturbed: str | None  # how it was computed differently, or why there is none
    facts: dict[str, Any] = {}  # text, plan, engine: where the numbers come from
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None

    def stored(self) -> dict[str, Any]:
        """As a manifest has it: numbers of records in place of sums."""
        found: dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda x: getattr(x, "number", None))
        return found

    @staticmethod
    def restored(stored: Mapping[str, Any], records: Mapping[int, bytes], cells: Cells) -> Attribution:
        """ValueError or KeyError if it cannot be: fields of other types, or records that are not there."""

        def opened(kind: type, value: Any) -> Any:
            return cells if kind is Cells else cells.damage(records[value], value)

        found = msgspec.convert(stored, Attribution, dec_hook=opened)
        recipe = None if found.recipe is None else structs.replace(found.recipe, uniform=found.candidates)
        return structs.replace(found, recipe=recipe)

    def __getitem__(self, candidate: int) -> CandidateDamage:
        return self.candidates[candidate]

    def __len__(self) -> int:
        return len(self.candidates)

    def kl(self, one: UnitDamage) -> Estimate:
        return self.cells.mean(one.damage.kl, within="positive")

    def kl_per_gigabit(self, one: UnitDamage) -> Estimate | None:
        """KL for each 10⁹ bits that the unit saves; None if it saves none."""
        if one.bits_saved <= 0:
            return None
        return transformed(self.kl(one), lambda x: x * GIGA / one.bits_saved, GIGA / one.bits_saved)

    def account(self, candidate: CandidateDamage) -> Account:
        return account_of(self.cells, [one.damage for one in candidate.units], candidate.whole, candidate.served)

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
            "candidates": [self._candidate_json(one) for one in self.candidates],
            **({} if self.recipe is None else {"recipe": self.recipe.as_json(self.cells)}),
        }

    def _candidate_json(self, candidate: CandidateDamage) -> dict[str, Any]:
        account = self.account(candidate)
        return {
            "name": candidate.name,
            "bits_per_weight": candidate.bits_per_weight,
            "notes": list(candidate.notes),
            "account": account.as_json(),
            "whole": self.statistics(candidate.whole),
            "served": None if candidate.served is None else self.statistics(candidate.served),
            "served_by": candidate.served_by,
            "units": [self._unit_json(one, account) for one in candidate.units],
        }

    def _unit_json(self, one: UnitDamage, account: Account) -> dict[str, Any]:
        kl, parts = self.kl(one), account.parts.value
        return {
            "unit": one.name,
            "layer": one.layer,
            "kind": one.kind,
            "weights": one.weights,
            "format": one.format,
            "bits": one.bits,
            "bits_saved": one.bits_saved,
            "changed": one.damage.is_changed,
            **self.statistics(one.damage),
            "share": finite_or_none(kl.value / parts) if parts else 0.0,
            **with_error_fields("kl_per_gigabit", self.kl_per_gigabit(one)),
        }

    def statistics(self, damage: Damage) -> dict[str, Any]:
        """KL, change of log-probability and share of same first choices, each with its error."""
        found = [
            (one, self.cells.mean(np.asarray(measured(one.mean)(damage), np.float64), within=one.range))
            for one in OF_DAMAGE
        ]
        return {name: value for one, mean in found for name, value in one.as_fields(mean).items()}


def ordered(found: Attribution, units: Sequence[UnitDamage]) -> list[UnitDamage]:
    """Units by their KL, the largest first."""
    return sorted(units, key=lambda one: -found.kl(one).value)
