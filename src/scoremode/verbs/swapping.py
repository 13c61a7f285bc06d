"""The loop of ``attribute``: one pass of the baseline, then each unit of each candidate in its place.

for each candidate, for each unit that the folder lacks:
    its tensors, de-quantized once ─▶ all windows, from the first layer that they change ─▶ sums ─▶ the folder
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scoremode.engines.baseline import noise_floor
from scoremode.errors import EngineError, ModelError, print_line
from scoremode.models.units import Unit
from scoremode.models.weights import CandidateWeights
from scoremode.plan.plan import Plan
from scoremode.plan.windows import Answers
from scoremode.scores.answers import check_answers, measured
from scoremode.statistics.cells import Damage, PlanCells
from scoremode.store.attribution_folder import AttributionFolder
from scoremode.values import Floats, Ids
from scoremode.verbs.progress import Progress, announce
from scoremode.verbs.scoring import check_divergence

if TYPE_CHECKING:
    import torch

    from scoremode.engines.transformers.swaps import SwappableModel

TOLD_FROM = 10**8  # bytes of states from which the user is told where they go


@dataclass(frozen=True, slots=True)
class Job:
    """Something that is measured: weights in place of the baseline's own."""

    words: str  # for people, as in "layer 3 of model-Q4_K_M.gguf"
    number: int  # of its record
    tensors: tuple[str, ...]
    read: Callable[[str], torch.Tensor]


def job_of(candidate: CandidateWeights, fingerprint: str, unit: Unit | None) -> Job:
    """The job of a unit, or of all weights of a candidate."""
    tensors = tuple(candidate.stored) if unit is None else unit.tensors
    words = f"{'all weights' if unit is None else unit.name} of {candidate.label}"
    return Job(words, record_number(fingerprint, *tensors), tensors, candidate.tensor)


def record_number(*parts: str) -> int:
    """The number of a record: it follows from what was measured, so that units may come in any order."""
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8], "little")


class SwapMeasurement:
    """Measures jobs on the windows of a plan, and keeps the results in a folder."""

    def __init__(
        self, swaps: SwappableModel, plan: Plan, cells: PlanCells, folder: AttributionFolder, progress: Progress | None
    ) -> None:
        self.swaps, self.plan, self.cells, self.folder, self.progress = swaps, plan, cells, folder, progress
        self._logprob: Floats | None = None  # (targets,) of the baseline, once it was scored
        self._top: Ids = np.zeros(0, np.int32)  # (targets,)

    def noise(self) -> tuple[Floats | None, str | None]:
        """The KL of the baseline to itself, computed in a different way, and what was different."""
        announce(self.progress, "computing the noise floor")
        floor = noise_floor(self.swaps.engine, self.plan)
        return floor.kl, floor.words

    def measure(self, jobs: Sequence[Job]) -> list[Damage]:
        """The damage of each job: read from the folder if it is there, else measured and kept there."""
        waiting = [job for job in jobs if job.number not in self.folder.records]
        if waiting and self._logprob is None:
            self._score_baseline(waiting)
        shares = [self._share(job) for job in waiting]
        total, done = int(sum(shares) * self.plan.forward_tokens), 0.0
        for number, (job, share) in enumerate(zip(waiting, shares, strict=True), 1):
            announce(self.progress, f"{job.words} ({number:,} of {len(waiting):,})", "label")
            self.folder.add(job.number, self._measured(job, done, share, total).packed())
            done += share * self.plan.forward_tokens
            if self.progress:
                self.progress(min(int(done), total), total)
        return [self._kept(job) for job in jobs]

    def _kept(self, job: Job) -> Damage:
        try:
            found = Damage.unpacked(self.folder.records[job.number])
        except ValueError:
            found = None
        if found is None or len(found.kl) != len(self.cells.cells.weight):
            raise EngineError(f"the record of {job.words} cannot be used", fix="measure again with --fresh")
        return found

    def _share(self, job: Job) -> float:
        """The part of a forward pass that a job takes, about."""
        layers = len(self.swaps.layers)
        return (layers + 1 - self.swaps.start_of(job.tensors)) / (layers + 1)

    def _score_baseline(self, jobs: Sequence[Job]) -> None:
        starts = {self.swaps.start_of(job.tensors) for job in jobs}
        place = self.swaps.place(self.plan, starts)
        if place.size >= TOLD_FROM or place.kind == "file":
            print_line(f"scoremode: {place.words}")
        announce(self.progress, "scoring the baseline")
        self._logprob, self._top = np.empty(self.plan.targets), np.empty(self.plan.targets, np.int32)
        fed, total = 0, self.plan.forward_tokens
        for index, answers in self.swaps.record(self.plan, starts, place):
            check_answers(self.swaps.engine.facts.schema, self.plan, [(index, answers)])
            here = self._rows(index)
            self._logprob[here], self._top[here] = answers.logprob[:, 0], measured(answers.top)
            fed += int(self.plan.lengths[index])
            if self.progress:
                self.progress(fed, total)
        announce(self.progress, "swapping")

    def _rows(self, window: int) -> slice:
        return slice(int(self.plan.target_offsets[window]), int(self.plan.target_offsets[window + 1]))

    def _measured(self, job: Job, before: float, share: float, total: int) -> Damage:
        try:
            with self.swaps.swapped(job.tensors, job.read) as changed:
                if not changed:
                    return self.cells.cells.unchanged()
                return self._damage(self._answers(self.swaps.start_of(changed), before, share, total))
        except EngineError as error:
            raise EngineError(f"{job.words}: {error.message}", fix=error.fix) from None

    def _answers(self, start: int, before: float, share: float, total: int) -> Iterator[tuple[int, Answers]]:
        fed = 0
        for index, answers in self.swaps.diverge(self.plan, start):
            check_answers(self.swaps.engine.facts.schema, self.plan, [(index, answers)])
            check_divergence(index, answers)
            yield index, answers
            fed += int(self.plan.lengths[index])
            if self.progress:
                self.progress(min(int(before + share * fed), total), total)

    def _damage(self, answered: Iterator[tuple[int, Answers]]) -> Damage:
        n, base = self.plan.targets, self._logprob
        assert base is not None, "the baseline is scored first"
        kl, logprob, top = np.full(n, np.nan), np.full(n, np.nan), np.empty(n, np.int32)
        for index, answers in answered:
            here = self._rows(index)
            kl[here], logprob[here], top[here] = measured(answers.kl), answers.logprob[:, 0], measured(answers.top)
        assert not np.isnan(kl).any(), "every window is answered"
        with np.errstate(invalid="ignore"):  # a target of probability zero under both has not moved
            moved = np.where(logprob == base, 0.0, logprob - base)
        return self.cells.damage(kl, moved, top == self._top)


def require_float_weights(swaps: SwappableModel, name: str) -> None:
    """Refuses a baseline whose own weights are quantized."""
    odd = next((n for n, p in swaps.parameters.items() if not p.is_floating_point() or p.element_size() < 2), None)
    quantized = getattr(swaps.model.config, "quantization_config", None)
    if odd is not None or quantized:
        raise ModelError(f"the weights of {name} are quantized", fix="give the model before it was quantized")


def stored_bits(weights: CandidateWeights, tensors: Sequence[str]) -> float:
    """The bits that some tensors of a candidate take in all."""
    return float(sum(weights.stored[name].bits * np.prod(weights.stored[name].shape) for name in tensors))


def formats_of(weights: CandidateWeights, tensors: Sequence[str]) -> str:
    """The formats of a unit's matrices, most weights first; of all its tensors if it has no matrix."""
    own = [weights.stored[name] for name in tensors]
    sizes: dict[str, Any] = {}
    for one in [one for one in own if len(one.shape) > 1] or own:
        sizes[one.format] = sizes.get(one.format, 0) + int(np.prod(one.shape))
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))
