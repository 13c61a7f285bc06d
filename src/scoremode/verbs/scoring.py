"""The loop: every window once, every score a number, nothing lost; the result is kept as a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scoremode.engines.base import Engine
from scoremode.errors import EngineError, ModelError
from scoremode.plan.plan import Plan
from scoremode.plan.windows import Answers
from scoremode.scores.answers import check_answers
from scoremode.scores.journal import Journal
from scoremode.store import runs
from scoremode.store.run import Run
from scoremode.values import Bools, Floats
from scoremode.verbs.manifest import add_account, make_manifest
from scoremode.verbs.progress import Progress, announce
from scoremode.verbs.question import Question
from scoremode.verbs.rows import rows_to_keep


def check_fits(plan: Plan, vocabulary: int | None, context: int | None) -> None:
    """Refuse a plan that a model cannot score: ids outside its vocabulary, windows longer than its context."""
    largest = plan.largest_id
    if vocabulary is not None and largest >= vocabulary:
        raise ModelError(
            f"the tokenizer gives id {largest}, but the model's vocabulary ends at {vocabulary - 1}",
            fix="the tokenizer does not belong to this model: give the right folder with --tokenizer",
        )
    longest = int(plan.lengths.max(initial=0))
    if context is not None and longest > context:
        raise ModelError(
            f"a window of {longest} tokens is longer than the model's context of {context}",
            fix="shorten the prompt" if plan.method == "sequence" else f"give --context-length {context}",
        )


Answered = Iterator[tuple[int, Answers]]
"""Windows as an engine answers them."""


def plain_answers(engine: Engine, plan: Plan, done: Bools) -> Answered:
    yield from engine.score(plan, done)


def score_plan(
    plan: Plan,
    engine: Engine,
    journal: Journal,
    progress: Progress | None = None,
    answered: Callable[[Engine, Plan, Bools], Answered] = plain_answers,
) -> None:
    """Score every target of a plan that fits into the journal; what it already has is not computed again."""
    lengths, total = plan.lengths, plan.forward_tokens
    fed = int(lengths[journal.done].sum())
    if progress:
        progress(fed, total)
    before = time.perf_counter()
    for index, answers in answered(engine, plan, journal.done.copy()):
        check_answers(journal.schema, plan, [(index, answers)])
        check_divergence(index, answers.kl, journal.least_kl)
        now = time.perf_counter()
        journal.add(index, answers, now - before)
        before = now
        fed += int(lengths[index])
        if progress:
            progress(fed, total)
    missing = int((~journal.done).sum())
    if missing:
        raise EngineError(f"the engine left {missing} of {len(plan)} windows without an answer", fix="run it again")


def check_divergence(index: int, kl: Floats | None, least: float = 0.0) -> None:
    """Infinite is a divergence; NaN is not, and neither is less than nothing, unless the baseline is not exact."""
    if kl is not None and not (kl >= least).all():
        raise EngineError(f"the divergence in window {index} is not a number", fix="this is a fault of the engine")


def score_into(
    asked: Question,
    engine: Engine,
    claim: runs.Claim,
    progress: Progress | None = None,
    *,
    answered: Callable[[Engine, Plan, Bools], Answered] = plain_answers,
    with_kl: bool = False,
    least_kl: float = 0.0,
    more: dict[str, Any] | None = None,
    before_saving: Callable[[dict[str, Any]], None] | None = None,
    kept: Bools | None = None,
) -> Run:
    """Score a question with an open engine into a folder that was claimed.

    ``more`` is added to the manifest; ``before_saving`` is given it when all is scored and nothing is finished yet.
    ``kept`` (windows,) says for which windows everything else that is kept, as hidden states, is complete. The others
    are scored again, even if the journal knows their scores.
    """
    check_fits(asked.plan, engine.facts.vocabulary, engine.facts.context_length)
    claim.begin()
    progress = claim.watched(progress)
    journal = Journal(
        claim.folder / runs.JOURNAL,
        claim.identity,
        asked.plan,
        engine.facts.schema,
        with_kl=with_kl,
        least_kl=least_kl,
        vocabulary=engine.facts.vocabulary,
    )
    try:
        for window in () if kept is None else np.flatnonzero(journal.done & ~kept).tolist():
            journal.forget(window)
        announce(progress, "scoring")
        score_plan(asked.plan, engine, journal, progress, answered)
        announce(progress, "computing statistics and saving")
        manifest = {**make_manifest(asked, engine.facts, journal, journal.seconds, claim.identity), **(more or {})}
        add_account(manifest, engine.account())
        if before_saving:
            before_saving(manifest)
        return claim.kept(runs.save(claim.folder, rows_to_keep(asked, journal), manifest, asked.plan.targets))
    finally:
        journal.close()
