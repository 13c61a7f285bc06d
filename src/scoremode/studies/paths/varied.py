"""One model in one of several settings: how its windows are fed, what it promises, and how far it lies from itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.engine.base import Engine
from scoremode.core.engine.baseline import few_windows
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import WindowList
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.question import Question
from scoremode.core.verbs.scoring import answered
from scoremode.studies.paths.turns import TurnsEngine
from scoremode.values import Floats, change

SHARE = 4  # one window in so many is computed again at most, but two at least


@dataclass(frozen=True, slots=True)
class Varied:
    """A model with the settings that its engine gets, and the question to it."""

    model: LazyModel
    asked: Question
    turn_tokens: int | None = None  # if windows are fed turn by turn, each from the prefix cache

    def fed(self, engine: Engine) -> Engine:
        """The open engine of the model, as it is fed."""
        return engine if self.turn_tokens is None else TurnsEngine(engine, self.turn_tokens)

    def kept_promise(self, d: Floats, what: str) -> str:
        """Says whether a promise of equal bits was kept, given differences ``d`` (targets,); '' if none was made."""
        promise = self.model.plugin.able().same_bits
        if not promise:
            return ""
        moved = int(np.count_nonzero(d))
        if not moved:
            return f"{promise} kept its promise: {what} has the same bits on all {len(d):,} targets"
        return (
            f"finding: {promise} promises the same bits in every batch, but {what} moved {moved:,} of {len(d):,} "
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
            before = logprob[first : first + len(answers.logprob)]
            moved.append(change(answers.logprob[:, 0], before))
    engine.account()  # belongs to this pass, which is not part of the run
    d = np.concatenate(moved)
    size = f"{len(chosen)} window{'s' if len(chosen) > 1 else ''}"
    company = f", {together} side by side instead of {usual}" if usual > 1 else ", one at a time"
    finite = bool(np.isfinite(d).all())
    return {
        "rms": float(np.sqrt(np.square(d).mean())) if finite else None,
        "largest": float(np.abs(d).max(initial=0.0)) if finite else None,
        "targets": len(d),
        "words": f"{size}{company}",
    }


NOT_RERUN = {"rms": None, "largest": None, "targets": 0, "words": "not measured with replicas"}
