"""One model in several settings, compared with itself: what ``noise``, ``paths`` and K/V types have in common.

model, settings ──▶ Variation ──score──▶ a run that is not kept       noise: every variation, several times
                              ──against_first──▶ Comparison           paths: every variation but the first, prefill

Either way, each is shown beside the same variation computed again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.cache.units import size_words
from scoremode.core.engine.base import Engine, FinalStates, WholeDistributions, only_one_way
from scoremode.core.engine.baseline import few_windows, noise_facts, stored_states
from scoremode.core.free_memory import available
from scoremode.core.plan.plan import Plan
from scoremode.core.references.reader import open_reference
from scoremode.core.scores.answers import WindowList
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.core.verbs.baselines import OpenBaseline, compare_with
from scoremode.core.verbs.compared_models import (
    NOISE,
    compared_with,
    require_both_fit,
)
from scoremode.core.verbs.model import LazyModel, in_memory
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress, announce
from scoremode.core.verbs.scoring import UnfinishedRun, answered, score_run
from scoremode.values import Floats, change

SHARE = 4  # one window in so many is computed again at most, but two at least
NOT_RERUN = {"rms": None, "largest": None, "targets": 0, "words": "not measured with replicas"}


@dataclass(frozen=True, slots=True)
class Variation:
    """A model with the settings that its engine gets, and the question to it."""

    settings: Mapping[str, object]  # what is changed, by name
    change: str  # from the first, in words: "decode against prefill"; '' if it may move scores of every engine
    model: LazyModel
    asked: PlannedQuestion

    @property
    def name(self) -> str:
        return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in self.settings.items())

    def sharing_start(self, later: Variation) -> Variation:
        """A later variation, with the model of this one if its open engine can feed both."""
        first, other = self.asked.plan.path, later.asked.plan.path
        is_shared = self.model.chosen == later.model.chosen and self.model.feeds_also(first, other)
        return replace(later, model=self.model) if is_shared else later

    def has_run(self, place: Place, first: Mapping[str, object]) -> bool:
        """Is its run there, which was compared with the run of that identity?"""
        at = place.within(self.name.replace(" ", "-"))
        return not place.fresh and self.model.has_run(self.asked, at, against=first)

    def engine(self, progress: Progress | None = None) -> Engine:
        return self.model.opened_for(self.asked, progress)

    def score(self, progress: Progress | None, counted: Progress | None) -> Run:
        """Always scores, and keeps nothing on disk; ``counted`` is told how many tokens are done."""
        with (
            tempfile.TemporaryDirectory(prefix="scoremode-") as folder,
            self.model.claimed(self.asked, Place(Path(folder))) as claim,
        ):
            return in_memory(score_run(self.asked, self.engine(progress), claim, counted))

    def close(self) -> None:
        self.model.close()

    def kept_promise(self, d: Floats, cause: str) -> str:
        """Says whether a promise of equal bits was kept, given differences ``d`` (targets,); '' if none was made."""
        promise = self.model.plugin.able().same_bits
        if not promise:
            return ""
        moved = int(np.count_nonzero(d))
        if not moved:
            return f"{promise} kept its promise: {cause} has the same bits on all {len(d):,} targets"
        return (
            f"finding: {promise} promises the same bits in every batch, but {cause} moved {moved:,} of {len(d):,} "
            f"targets, by up to {float(np.abs(d).max()):.2g} nats"
        )


def rerun(engine: Engine, plan: Plan, logprob: Floats) -> dict[str, Any]:
    """Computes a few windows of a plan again and returns a manifest's facts on how far their scores moved.

    ``logprob`` (targets,) are the scores of the whole plan. On the decode path, half as many windows as usual are side
    by side; on other paths each window is alone. A window that is always alone is computed in the same way again.
    """
    chosen = few_windows(plan)[: max(2, len(plan) // SHARE)]
    usual = min(plan.path.sequences, len(plan)) if plan.path else 1
    together = max(1, usual // 2)
    moved: list[Floats] = []
    for begin in range(0, len(chosen), together):
        some = chosen[begin : begin + together].tolist()
        windows = WindowList(tuple(plan.window(index) for index in some), vocabulary=plan.vocabulary)
        for place, answers in answered(engine, windows):
            first = int(plan.target_offsets[some[place]])
            moved.append(change(answers.logprob[:, 0], logprob[first : first + len(answers.logprob)]))
    engine.account()  # belongs to this pass, which is not part of the run
    d = np.concatenate(moved)
    company = f", {together} side by side instead of {usual}" if usual > 1 else ", one at a time"
    finite = bool(np.isfinite(d).all())
    return {
        "rms": float(np.sqrt(np.square(d).mean())) if finite else None,
        "largest": float(np.abs(d).max(initial=0.0)) if finite else None,
        "targets": len(d),
        "words": f"{len(chosen)} window{'s' if len(chosen) > 1 else ''}{company}",
    }


def against_first(first: Variation, run: Run, other: Variation, place: Place) -> Comparison:
    """Compares another variation with the first, whose run is ``run``. If the other has a run already, it is read."""
    other.model.variant = other.name
    against = AgainstFirst(other.asked, run, first, other, place.progress)
    return compare_with(nullcontext(against), other.model, place)


@dataclass
class AgainstFirst(OpenBaseline):
    """The first variation of a model as the baseline of another."""

    first: Variation
    other: Variation
    progress: Progress | None

    @property
    def identity(self) -> dict[str, object]:
        return {"against": self.finished().manifest["identity"], **({"without": "kl"} if self.missing else {})}

    def distributions(self, candidate: LazyModel) -> FinalStates | WholeDistributions | None:
        """The stored distributions of the first, or the logits of an engine that runs at the same time."""
        plan = self.planned.plan
        if self.missing:
            return None
        if self.first.model.plugin.able().hidden_states:
            return stored_states(open_reference(str(self.finished().path)), plan.target_offsets)
        from scoremode.core.engine.logits import LiveLogits

        side_by_side = plan.path.sequences if plan.path else 1
        require_both_fit(self.first.model, candidate, int(plan.lengths.max()) * side_by_side)
        engine = self.first.engine(self.progress)
        return LiveLogits(engine, plan, whole_windows=side_by_side > 1)

    def facts(self, run: UnfinishedRun, candidate: LazyModel) -> Mapping[str, object]:
        first = self.finished()
        noise: Mapping[str, object] = {name: first.manifest.get(name) for name in NOISE}
        if not candidate.plugin.able().hidden_states:
            noise = noise_facts(only_one_way(run.engine))
        facts = compared_with(first, noise, candidate)
        del facts["variant"]  # the settings of the plan or of the engine tell the variations apart
        logprob = run.journal.scores.logprob
        announce(self.progress, "scoring a few windows again")
        facts["rerun"] = rerun(run.engine, run.planned.plan, logprob) if candidate.spread is None else NOT_RERUN
        if promise := self.other.kept_promise(change(logprob, first.scores.logprob), self.other.change):
            facts["promise"] = promise
        return facts

    @cached_property
    def missing(self) -> str | None:
        """Says why KL cannot be measured; None if it can."""
        model, plan = self.first.model, self.planned.plan
        able, side_by_side = model.plugin.able(), plan.path.sequences if plan.path else 1
        if able.hidden_states:
            return None
        if not able.logits or model.spread is not None:
            return f"KL between the paths needs hidden states, which the {model.engine_name} engine does not give"
        # the logits of a batch of windows, and while the next batch begins, those of the last one
        rows = int(plan.target_counts.max()) * min(side_by_side, len(plan))
        held, free = 2 * rows * (self.planned.subject.vocabulary or 0) * 4, available()
        if side_by_side == 1 or free is None or held < free // 2:
            return None
        return (
            f"KL between the paths would hold about {size_words(held)} of logits for {side_by_side} sequences, "
            "more than half of the free memory: give --sequences 1"
        )
