"""The loop of ``attribute``: every unit of every candidate in place of the baseline's own.

for each candidate, for each unit that the folder lacks:    the swapper's columns ─▶ sums ─▶ the folder
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.core.verbs.progress import Progress, announce
from scoremode.errors import EngineError
from scoremode.studies.attribution.cells import Damage, PlanCells
from scoremode.studies.attribution.folder import AttributionFolder
from scoremode.studies.attribution.swapping import Swap, Swapper, WeightFacts
from scoremode.studies.attribution.units import Unit
from scoremode.values import Floats


@dataclass(frozen=True, slots=True)
class Job:
    swap: Swap
    number: int  # of its record


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate's name, what tells its weights from others, and what is known about them."""

    name: str
    fingerprint: str
    weights: WeightFacts

    def job(self, unit: Unit | None) -> Job:
        """The job of a unit, or of all weights."""
        tensors = tuple(self.weights.stored) if unit is None else unit.tensors
        words = f"{'all weights' if unit is None else unit.name} of {self.weights.label}"
        return Job(Swap(words, dict.fromkeys(tensors, self.name)), record_number(self.fingerprint, *tensors))


def record_number(*parts: str) -> int:
    """The number of a record: it follows from what was measured, so that units may come in any order."""
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8], "little")


class SwapMeasurement:
    """Measures jobs on the windows of a plan, and keeps the results in a folder."""

    def __init__(
        self, swapper: Swapper, plan: Plan, cells: PlanCells, folder: AttributionFolder, progress: Progress | None
    ) -> None:
        self.swapper, self.plan, self.cells, self.folder, self.progress = swapper, plan, cells, folder, progress

    def noise(self) -> tuple[Floats | None, str | None]:
        """The KL of the baseline to itself, computed in a different way, and what was different."""
        announce(self.progress, "computing the noise floor")
        floor = self.swapper.noise(self.plan)
        return floor.kl, floor.words

    def measure(self, jobs: Sequence[Job]) -> list[Damage]:
        """The damage of each job: read from the folder if it is there, else measured and kept there."""
        if waiting := [job for job in jobs if job.number not in self.folder.records]:
            self._measure(waiting)
        return [self._kept(job) for job in jobs]

    def _measure(self, jobs: Sequence[Job]) -> None:
        swaps, tokens = [job.swap for job in jobs], self.plan.forward_tokens
        facts, layers = self.swapper.facts, self.swapper.facts.layers + 1
        shares = [(layers - facts.start_of(swap.sources)) / layers for swap in swaps]  # of a forward pass, about
        total, parts = int(sum(shares) * tokens), np.zeros(len(jobs))

        def tell(number: int, part: float) -> None:
            if not part:
                announce(self.progress, f"{swaps[number].words} ({number + 1:,} of {len(swaps):,})", "label")
            parts[number] = part
            if self.progress:
                self.progress(min(int(parts @ shares * tokens), total), total)

        announce(self.progress, "scoring the baseline")
        self.swapper.record(self.plan, swaps, lambda fed: self.progress(fed, tokens) if self.progress else None)
        announce(self.progress, "swapping")
        for number, columns in self.swapper.columns(self.plan, swaps, tell):
            found = self.cells.cells.unchanged()
            if columns is not None:
                found = self.cells.damage(columns.kl, columns.moved, columns.same)
            self.folder.add(jobs[number].number, found.packed())
            tell(number, 1.0)

    def _kept(self, job: Job) -> Damage:
        try:
            found = Damage.unpacked(self.folder.records[job.number])
        except ValueError:
            found = None
        if found is None or len(found.kl) != len(self.cells.cells.weight):
            raise EngineError(f"the record of {job.swap.words} cannot be used", fix="measure again with --fresh")
        return found


def stored_bits(weights: WeightFacts, tensors: Sequence[str]) -> float:
    """The bits that some tensors of a candidate take in all."""
    return float(sum(weights.stored[name].bits * np.prod(weights.stored[name].shape) for name in tensors))


def formats_of(weights: WeightFacts, tensors: Sequence[str]) -> str:
    """The formats of a unit's matrices, most weights first; of all its tensors if it has no matrix."""
    own = [weights.stored[name] for name in tensors]
    sizes = Counter[str]()
    for one in [one for one in own if len(one.shape) > 1] or own:
        sizes[one.format] += math.prod(one.shape)
    return ", ".join(name for name, _ in sizes.most_common())
