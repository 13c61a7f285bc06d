"""Sums over targets of one group in one half of the windows: small enough to keep for hundreds of units.

plan ──▶ Cells: which cell each target is in, and the weight of each cell
columns of a swap ──▶ Damage: sums per cell ──▶ means with errors over groups; of all windows, or of one half
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.core.statistics.estimate import GroupSums
from scoremode.core.statistics.groups import grouping, weights_of
from scoremode.values import Bools, Estimate, Floats, Ints, Range

HALVES = ("first", "second")


class Damage:
    """Sums over the targets of each cell, each target times its weight in the method's mean."""

    def __init__(self, kl: Floats, moved: Floats, same: Floats, is_changed: bool = True) -> None:
        self.kl = kl  # (cells,) of KL(baseline‖swapped), nats
        self.moved = moved  # (cells,) of the change of log-probability, ln q - ln p
        self.same = same  # (cells,) of targets whose first choice is the same
        self.is_changed = is_changed  # False: the weights are equal, and nothing was computed

    def packed(self) -> bytes:
        return bytes([self.is_changed]) + np.stack([self.kl, self.moved, self.same]).astype("<f8").tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    group: Ints  # (cells,) 0, 1, …
    half: Ints  # (cells,) 0: in the first half of the windows
    weight: Floats  # (cells,) sum of the targets' weights
    targets: Ints  # (cells,)

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

    def damage(self, record: bytes) -> Damage:
        """The sums in a record. ValueError if they are not those of these cells."""
        if len(record) != 1 + 24 * len(self.weight):
            raise ValueError("a record has other cells than its manifest")
        kl, moved, same = np.frombuffer(record, "<f8", offset=1).reshape(3, -1).astype(np.float64)
        return Damage(kl, moved, same, bool(record[0]))

    def unchanged(self) -> Damage:
        """The damage of weights that are equal to the baseline's: none."""
        nothing = np.zeros(len(self.weight))
        return Damage(nothing, nothing, self.weight.copy(), is_changed=False)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in ("group", "half", "weight", "targets")}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Cells:
        """The cells in a manifest. ValueError if they cannot be."""
        ints = {name: np.asarray(stored[name], np.int64) for name in ("group", "half", "targets")}
        if len({len(numbers) for numbers in stored.values()}) != 1 or not ints["targets"].any():
            raise ValueError("its cells have different lengths, or no targets")
        return Cells(weight=np.asarray(stored["weight"], np.float64), **ints)


class PlanCells:
    """The cells of a plan, and the cell and weight of every target."""

    def __init__(self, plan: Plan) -> None:
        groups, half = grouping(plan), (len(plan) + 1) // 2
        self.kind = groups.kind
        self.index: Ints = 2 * groups.of_target + (plan.target_window >= half)
        self.weight = weights_of(plan)
        count = 2 * max(1, groups.count)
        numbers = np.arange(count)
        weight: Floats = np.bincount(self.index, self.weight, count).astype(np.float64)
        self.cells = Cells(numbers // 2, numbers % 2, weight, np.bincount(self.index, minlength=count))

    def damage(self, kl: Floats, moved: Floats, same: Bools) -> Damage:
        """Adds up the columns of a swap, one line per target."""
        count = len(self.cells.weight)
        columns = (kl, moved, same)
        sums: list[Floats] = [np.bincount(self.index, x * self.weight, count).astype(np.float64) for x in columns]
        return Damage(sums[0], sums[1], sums[2])
