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

from scoremode.core.statistics.estimate import finite_or_none, transformed, with_error_fields
from scoremode.studies.attribution.account import Account, account_of
from scoremode.studies.attribution.cells import Cells, Damage
from scoremode.studies.attribution.recipe_statistics import Recipe
from scoremode.values import Estimate, Floats

GIGA = 1e9


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class CandidateDamage:
    """A candidate, unit by unit and as a whole."""

    name: str
    bits_per_weight: float
    units: tuple[UnitDamage, ...]
    whole: Damage
    served: Damage | None = None  # as an engine serves it
    served_by: str | None = None
    notes: tuple[str, ...] = ()


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
        """All figures as plain data."""
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
        return {
            **with_error_fields("kl", self.cells.mean(damage.kl, within="positive")),
            **with_error_fields("delta_logprob", self.cells.mean(damage.moved)),
            **with_error_fields("same_top", self.cells.mean(damage.same, within="share")),
        }


def ordered(found: Attribution, units: Sequence[UnitDamage]) -> list[UnitDamage]:
    """Units by their KL, the largest first."""
    return sorted(units, key=lambda one: -found.kl(one).value)
