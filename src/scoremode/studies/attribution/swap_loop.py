"""The loop of ``attribute``: every unit of every candidate in place of the baseline's own.

one pass of the baseline, which keeps the states between its layers
for each candidate, for each unit that the folder lacks:
    its tensors, de-quantized once ─▶ all windows, from the first layer that they change ─▶ sums ─▶ the folder

DIR/attribution.journal   a record for each unit that was measured: its sums
DIR/attribution.json      what was measured and how; written last, so if it is there, the attribution is complete
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from scoremode.core.disk.records import identity_in
from scoremode.core.engine.options import CheckpointOptions
from scoremode.core.models.facts import weight_files
from scoremode.core.models.safetensors import read_header
from scoremode.core.models.subject import Subject
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Answers, check_answers, measured
from scoremode.core.store.resumable import Resumable
from scoremode.core.verbs.progress import Progress, announce
from scoremode.errors import EngineError, RunError
from scoremode.studies.attribution.result import Cells, Damage
from scoremode.studies.attribution.units import Unit
from scoremode.studies.attribution.weight_formats.stored import Stored, stored_weights
from scoremode.studies.attribution.weights import CandidateWeights, OwnHeadError, open_weights, text_type
from scoremode.values import Floats, change

if TYPE_CHECKING:
    from scoremode.studies.attribution.engines.transformers_swaps import SwappableModel

ATTRIBUTION, PARTIAL_ATTRIBUTION = "attribution.json", "attribution.journal"  # files of the folder
AGAIN = "measure again with --fresh"
UNTIED = "the head of {} is its embedding; a candidate has a head of its own, so both are measured apart"


@dataclass(frozen=True, slots=True)
class SwapJob:
    """Weights of candidates in place of the baseline's own, to be measured."""

    words: str  # for people, as in "layer 3 of model-Q4_K_M.gguf"
    sources: Mapping[str, str]  # name of a parameter ─▶ the candidate that it is taken from
    number: int  # of its record


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate's name, what tells its weights from others, and the weights."""

    name: str
    fingerprint: str
    weights: CandidateWeights

    def job(self, unit: Unit | None) -> SwapJob:
        """The job of a unit, or of all weights."""
        tensors = tuple(self.weights.stored) if unit is None else unit.tensors
        description = f"{'all weights' if unit is None else unit.name} of {self.weights.label}"
        return SwapJob(description, dict.fromkeys(tensors, self.name), record_number(self.fingerprint, *tensors))


def record_number(*parts: str) -> int:
    """The number of a record: it follows from what was measured, so that units may come in any order."""
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8], "little")


def open_candidates(
    swaps: SwappableModel, subject: Subject, prints: Mapping[str, str], options: CheckpointOptions
) -> tuple[Stored, list[Candidate]]:
    """How the baseline's weights are stored, and its candidates, whose names are given with their fingerprints.

    ``options`` are those of the baseline; a candidate is loaded into main memory in the baseline's dtype. If it has a
    head of its own, the baseline gets one as well.
    """
    assert subject.checkpoint is not None
    files = [tensor for file in weight_files(subject.checkpoint.path)[0] for tensor in read_header(file).values()]
    options = replace(options, dtype=str(swaps.model.dtype).removeprefix("torch."))
    model_type, mark = text_type(swaps.model.config.to_dict()), ""

    def opened() -> tuple[Stored, dict[str, CandidateWeights]]:
        shapes = {name: tuple(parameter.shape) for name, parameter in swaps.parameters.items()}
        stored = stored_weights(subject.name, shapes, files)
        opening = partial(open_weights, baseline=shapes, baseline_stored=stored, model_type=model_type, options=options)
        return stored, {label: opening(label, read_baseline=swaps.own_weight) for label in prints}

    try:
        stored, weights_by_name = opened()
    except OwnHeadError:
        swaps.untie_head()
        swaps.notes.append(UNTIED.format(subject.name))
        # the embedding of a tied baseline is its head too, so what was measured for it holds for that alone
        mark = " beside a head"
        stored, weights_by_name = opened()
    return stored, [Candidate(label, prints[label] + mark, weights) for label, weights in weights_by_name.items()]


@dataclass(slots=True)
class SwapMeasurement:
    """Measures jobs on the windows of a plan, and keeps the results in a folder."""

    swaps: SwappableModel
    candidates: Sequence[Candidate]
    plan: Plan
    cells: Cells
    folder: AttributionFolder
    progress: Progress | None = None
    baseline: tuple[Floats, Floats] | None = None  # log-probabilities and first choices of all targets

    def measure(self, jobs: Sequence[SwapJob]) -> list[Damage]:
        """The damage of each job: read from the folder if it is there, else measured and kept there."""
        if waiting := [job for job in jobs if job.number not in self.folder.records]:
            self._measure(waiting)
        return [Damage.unpacked(self.folder.records[job.number]) for job in jobs]

    def _measure(self, jobs: Sequence[SwapJob]) -> None:
        if self.baseline is None:
            self.baseline = self.record(jobs)
        tokens, total = self.plan.forward_tokens, self.plan.forward_tokens * len(jobs)
        announce(self.progress, "swapping")
        for number, job in enumerate(jobs):
            announce(self.progress, f"{job.words} ({number + 1:,} of {len(jobs):,})", "label")

            def tell(fed: int, _: int, before: int = number * tokens) -> None:
                if self.progress:
                    self.progress(before + fed, total)

            self.folder.add(job.number, self._damage(job, tell).packed())
            tell(tokens, tokens)

    def record(self, jobs: Sequence[SwapJob]) -> tuple[Floats, Floats]:
        """Scores the baseline and keeps the states that these jobs start from."""
        announce(self.progress, "scoring the baseline")
        starts = {self.swaps.start_of(job.sources) for job in jobs}
        logprob, top, _ = self._columns(self.swaps.record(self.plan, starts), self.progress)
        return logprob, top

    def _damage(self, job: SwapJob, progress: Progress) -> Damage:
        assert self.baseline is not None
        weights = {candidate.name: candidate.weights for candidate in self.candidates}
        try:
            with self.swaps.swapped(job.sources, lambda name: weights[job.sources[name]].tensor(name)) as changed:
                if not changed:
                    return self.cells.unchanged()
                logprob, top, kl = self._columns(self.swaps.diverge(self.plan, self.swaps.start_of(changed)), progress)
        except EngineError as error:
            raise EngineError(f"{job.words}: {error.message}", fix=error.fix) from None
        assert not np.isnan(kl).any(), "every window is answered"
        return self.cells.sums(kl, change(logprob, self.baseline[0]), top == self.baseline[1])

    def _columns(
        self, answered: Iterator[tuple[int, Answers]], progress: Progress | None
    ) -> tuple[Floats, Floats, Floats]:
        """Log-probability, first choice and KL of every target; KL is NaN if it was not asked for."""
        plan, fed = self.plan, 0
        logprob, top, kl = np.full((3, plan.targets), np.nan)
        for index, answers in answered:
            check_answers(plan, [(index, answers)])
            here = slice(int(plan.target_offsets[index]), int(plan.target_offsets[index + 1]))
            logprob[here], top[here] = answers.logprob[:, 0], measured(answers.top)
            if answers.kl is not None:
                kl[here] = answers.kl
            fed += int(plan.lengths[index])
            if progress:
                progress(fed, plan.forward_tokens)
        return logprob, top, kl


def stored_bits(stored: Stored, tensors: Sequence[str]) -> float:
    return float(sum(stored[name].bits * np.prod(stored[name].shape) for name in tensors))


def formats_of(stored: Stored, tensors: Sequence[str]) -> str:
    """The formats of a unit's matrices, most weights first; of all its tensors if it has no matrix."""
    weights = [stored[name] for name in tensors]
    sizes = Counter[str]()
    for weight in [weight for weight in weights if len(weight.shape) > 1] or weights:
        sizes[weight.format] += math.prod(weight.shape)
    return ", ".join(name for name, _ in sizes.most_common())


# ── the folder: one process at a time, and every finished unit kept at once ───────────────────────────────────────────
class ManifestForm(msgspec.Struct):
    """The field of attribution.json that tells what it answers; the others are those of the JSON of its result."""

    identity: dict[str, Any]


class AttributionFolder(Resumable[bool]):
    """The folder of an attribution. Its records are used by every call with the same baseline and text."""

    what, other, again = "a folder of an attribution", "another attribution (it differs in: {})", AGAIN
    manifest, form = ATTRIBUTION, ManifestForm
    journal, header, keeps_journal = PARTIAL_ATTRIBUTION, {"for": "attribution"}, True
    records: dict[int, bytes]  # of units that were measured

    def _open(self, manifest: object) -> bool:
        if identity_in(self.folder / PARTIAL_ATTRIBUTION) != self.identity:
            raise RunError(f"{self.folder} contains {ATTRIBUTION} without its journal", fix=AGAIN)
        return True

    def begin(self, about: Mapping[str, str] | None = None) -> None:
        """Takes the folder over when the model is ready; ``records`` has what was measured before."""
        super().begin(about)
        self.records = {number: body for number, _, body in self.open_journal().replay()}

    def add(self, number: int, body: bytes) -> None:
        assert self._records is not None, "begin comes first"
        self._records.append(number, body)
        self.records[number] = body
