"""What changed between a baseline and a candidate: the same plan, target by target, over the whole vocabulary.

baseline ──states──▶ hidden states and head ──┐
candidate ──────────▶ its own states and head ─┴─head──▶ KL, scores of the candidate ──▶ Comparison

Hidden states come from a stored reference, or from the baseline itself, which runs beside the candidate. Either way
the candidate is scored once, and each model's distribution is made by its own head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scoremode import runs
from scoremode.engines.base import Baseline, Engine, EngineOptions, Raw, StoredHead, gather_options
from scoremode.engines.lookup import chosen_settings, engine_name, open_engine
from scoremode.errors import InputError
from scoremode.metrics import groups_of
from scoremode.perplexity import Question, ask, identify, score_into
from scoremode.scoring import Answered, Progress
from scoremode.types import Answers, Bools, Comparison, Floats, Plan, Run, Window


class LiveBaseline:
    """A baseline that runs beside the candidate: windows are scored as the candidate asks for them.

    Both engines cut a plan into the same batches, so little is kept waiting: what the baseline is ahead.
    """

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self.engine, self.plan = engine, plan
        self.head: StoredHead = engine.stored_head()
        self.dtype = self.head.dtype
        self._coming: Iterator[tuple[int, Answers, Raw]] | None = None
        self._waiting: dict[int, Raw] = {}

    def states(self, index: int, window: Window) -> Raw:
        if index not in self._waiting:
            self._advance_to(index)
        raw = self._waiting.pop(index)
        assert len(raw) == len(window.rows), "a state for each row"
        return raw

    def _advance_to(self, index: int) -> None:
        if self._coming is None:
            self._coming = self.engine.score_with_states(self.plan, np.zeros(len(self.plan), np.bool_))
        for found, _, raw in self._coming:
            self._waiting[found] = raw
            if found == index:
                self.dtype = _dtype_of(raw)
                return
        # asked for a second time, as after running out of memory: begin again
        self._coming = None
        if index not in self._waiting:
            self._advance_to(index)


def _dtype_of(raw: Raw) -> str:
    return "bfloat16" if raw.dtype == np.uint16 else str(raw.dtype)


def against(baseline: Baseline, engine: Engine, plan: Plan, done: Bools) -> Answered:
    yield from engine.score_against(baseline, plan, done)


def require_same_question(baseline: Question, candidate: Question) -> None:
    """Refuse what cannot be compared, with the reason and what would make it comparable."""
    mine, theirs = baseline.tokens.tokenizer, candidate.tokens.tokenizer
    names = f"{baseline.subject.name} and {candidate.subject.name}"
    if mine.fingerprint != theirs.fingerprint:
        raise InputError(
            f"{names} have different tokenizers, so they do not score the same tokens",
            fix="compare perplexities a byte instead: scoremode ppl prints bits per byte for each",
        )
    if baseline.plan.digest != candidate.plan.digest:
        raise InputError(
            f"{names} give different plans for this text: {_difference(baseline.plan, candidate.plan)}",
            fix="give --context-length and --stride that both models allow",
        )


def _difference(a: Plan, b: Plan) -> str:
    if a.method != b.method:
        return f"methods {a.method} and {b.method}"
    given, other = dict(a.settings), dict(b.settings)
    differing = sorted(k for k in given.keys() | other.keys() if given.get(k) != other.get(k))
    if differing:
        return ", ".join(f"{k} {given.get(k)} and {other.get(k)}" for k in differing)
    return f"{len(a)} and {len(b)} windows"


@dataclass(frozen=True, slots=True)
class Side:
    """One model of a comparison, before it is loaded."""

    asked: Question
    engine: str
    options: EngineOptions
    identity: dict[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        return self.asked.subject.name

    def open(self) -> Engine:
        longest = int(self.asked.plan.lengths.max())
        return open_engine(self.asked.subject, self.engine, self.options, longest=longest)


def compare_models(
    baseline: str,
    candidate: str,
    *,
    engine: str | None = None,
    options: EngineOptions | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **question: Any,
) -> Comparison:
    """Two models in lockstep: both loaded, every window scored by both.

    ``question`` is what :func:`scoremode.perplexity.ask` takes, and by name what EngineOptions has.

    >>> compare_models("table:uniform", "table:uniform", text="any text").kl.max()
    np.float64(0.0)
    """
    options = gather_options(options, question)
    asked_p, asked_q = (ask(model, **question) for model in (baseline, candidate))
    require_same_question(asked_p, asked_q)
    p = _side(asked_p, engine, options, Path(out) / "baseline" if out else None, None)
    q = _side(asked_q, engine, options, Path(out) / "candidate" if out else None, p.identity)
    run_p, run_q = (runs.claim(side.folder, side.identity, fresh=fresh) for side in (p, q))
    if run_p is None or run_q is None:
        run_p, run_q = _score_both(p, q, progress)
    return as_comparison(candidate, run_p, run_q, asked_p.plan)


def _side(
    asked: Question, engine: str | None, options: EngineOptions, folder: Path | None, against: dict[str, Any] | None
) -> Side:
    name = engine_name(engine, asked.subject)
    settings = chosen_settings(asked.subject, name, options)
    identity = identify(asked, name, settings if against is None else {**settings, "against": against})
    return Side(asked, name, options, identity, folder or runs.default_folder(identity))


def _score_both(p: Side, q: Side, progress: Progress | None) -> tuple[Run, Run]:
    workers: list[Engine] = []
    try:
        for side in (p, q):
            workers.append(side.open())
        run_p = _finished(p.folder) or score_into(p.asked, workers[0], p.identity, p.folder, progress)
        live = LiveBaseline(workers[0], p.asked.plan)
        more = {"against": {"model": p.name, "fingerprint": p.asked.subject.fingerprint}}
        scored = partial(against, live)
        run_q = _finished(q.folder) or score_into(
            q.asked, workers[1], q.identity, q.folder, progress, answered=scored, with_kl=True, more=more
        )
        return run_p, run_q
    finally:
        for worker in workers:
            worker.close()


def _finished(folder: Path) -> Run | None:
    return runs.load(folder) if (folder / runs.MANIFEST).exists() else None


def as_comparison(name: str, baseline: Run, candidate: Run, plan: Plan) -> Comparison:
    _, groups = groups_of(plan)
    return Comparison(
        name=name,
        baseline=baseline,
        candidate=candidate,
        groups=groups,
        weight=_weights(plan),
        kl=candidate.kl,
        noise_kl=None,
        manifest={},
        path=candidate.path,
    )


def _weights(plan: Plan) -> Floats:
    """How much each target counts in the method's mean."""
    if plan.average != "window":
        return np.ones(plan.targets)
    assert plan.weight is not None
    weights: Floats = (plan.weight / plan.target_counts)[plan.target_window]
    return weights
