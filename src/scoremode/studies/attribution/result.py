"""What the weights of each unit of a model do to its predictions: KL, change of log-probability, same first choice.

Sums over targets are kept for each cell: the targets of one group (groups.py) in one half of the windows. So every
number has a paired error over groups, sums and differences of units have one too, and a recipe that was chosen on the
first half of the windows can be measured on the second half, which it has not seen.

Structs are as a manifest has them, but for sums: there, these are numbers of records (swap_loop.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from scoremode.core.disk.manifests import Count, Text
from scoremode.core.scores.answers import measured
from scoremode.core.statistics.estimate import finite_or_none, transformed, with_error_fields
from scoremode.core.statistics.statistic import Statistic
from scoremode.studies.attribution.cells import Cells, Damage
from scoremode.studies.attribution.tool_recipes import WrittenRecipe
from scoremode.values import Estimate, Floats

GIGA = 1e9
SEEN, HELD_OUT = "first", "second"  # halves of the windows
SMALLER, LARGER = 0.995, 1.02  # a uniform candidate has the size of a mixture within these factors


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


@dataclass(frozen=True)
class Attribution:
    """Where the damage of candidates is: per unit, with errors, and the account of the whole."""

    baseline: str
    by: str
    cells: Cells
    candidates: tuple[CandidateDamage, ...]
    noise_kl: Floats | None  # (m,) KL of the baseline to itself, computed in a different way; None if not measured
    noise_perturbed: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)  # text, plan, engine: where the numbers come from
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None

    @property
    def noise(self) -> float | None:
        """The mean KL of the baseline to itself: what is below cannot be told from rounding."""
        return None if self.noise_kl is None or not len(self.noise_kl) else float(np.mean(self.noise_kl))

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
