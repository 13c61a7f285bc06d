"""A mixture of precisions that was chosen on the first half of the windows and measured on the second half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.core.statistics.estimate import with_error_fields
from scoremode.studies.attribution.cells import Cells, Damage
from scoremode.values import Estimate

SEEN, HELD_OUT = "first", "second"  # halves of the windows
SMALLER, LARGER = 0.995, 1.02  # a uniform candidate has the size of a mixture within these factors


@dataclass(frozen=True, slots=True)
class Uniform:
    """A candidate with all of its weights, beside a mixture."""

    name: str
    bits_per_weight: float
    damage: Damage


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which candidate each unit is taken from, what that was predicted to do, and what it did."""

    budget: str  # in words
    chosen: Mapping[str, str]  # unit -> candidate, or the baseline
    bits_per_weight: float
    predicted: float  # KL: the sum of the units' damages on the windows that it was chosen on
    gap: float  # the best mixture is predicted to be better by at most this; 0: this is the best
    damage: Damage  # of the mixture, really built
    uniform: tuple[Uniform, ...]
    written: tuple[Mapping[str, Any], ...] = ()  # recipes of tools: tool, suffix, text, command, notes

    def measured(self, cells: Cells) -> Estimate:
        """KL of the mixture on windows that it was not chosen on."""
        return cells.mean(self.damage.kl, HELD_OUT, within="positive")

    def rival(self) -> Uniform | None:
        """The smallest uniform candidate that is not smaller than the mixture."""
        large = [one for one in self.uniform if one.bits_per_weight >= self.bits_per_weight * SMALLER]
        return min(large, key=lambda one: one.bits_per_weight, default=None)

    def difference(self, cells: Cells, other: Uniform) -> Estimate:
        """KL of the mixture minus that of a uniform candidate, on held-out windows: below 0, the mixture is better."""
        return cells.mean(self.damage.kl - other.damage.kl, HELD_OUT)

    def verdict(self, cells: Cells) -> str:
        """Whether the mixture beats a uniform candidate of its size, in a sentence."""
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
                    **with_error_fields("kl", cells.mean(one.damage.kl, HELD_OUT, within="positive")),
                    **with_error_fields("difference", self.difference(cells, one)),
                }
                for one in sorted(self.uniform, key=lambda one: one.bits_per_weight)
            ],
            "chosen": dict(self.chosen),
            "tools": [{name: one[name] for name in ("tool", "suffix", "command", "notes")} for one in self.written],
        }
