"""The loop: every window once, every score a number, nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from scoremode.engines.base import Engine
from scoremode.errors import EngineError, ModelError
from scoremode.journal import Journal
from scoremode.types import Answers, Bools, Floats, Plan, Window

Progress = Callable[[int, int], None]
"""Called with forward tokens done and forward tokens in all."""


def check_fits(plan: Plan, vocabulary: int | None, context: int | None) -> None:
    """Refuse a plan that a model cannot score: ids outside its vocabulary, windows longer than its context."""
    largest = max(int(plan.ids.max(initial=0)), int(plan.lead.max(initial=-1)))
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


Answered = Iterator[tuple[int, Answers, Floats | None]]
"""Windows as an engine answers them, each with its divergence from a baseline where there is one."""


def plain_answers(engine: Engine, plan: Plan, done: Bools) -> Answered:
    for index, answers in engine.score(plan, done):
        yield index, answers, None


def score_plan(
    plan: Plan,
    engine: Engine,
    journal: Journal,
    progress: Progress | None = None,
    answered: Callable[[Engine, Plan, Bools], Answered] = plain_answers,
) -> None:
    """Score every target of a plan that fits into the journal; what it already has is not computed again."""
    total = plan.forward_tokens
    fed = int(plan.lengths[journal.done].sum())
    if progress:
        progress(fed, total)
    before = time.perf_counter()
    for index, answers, kl in answered(engine, plan, journal.done.copy()):
        window = plan.window(index)
        check_answers(index, window, answers)
        check_divergence(index, kl)
        now = time.perf_counter()
        journal.add(index, answers, now - before, kl)
        before = now
        fed += len(window.ids)
        if progress:
            progress(fed, total)
    missing = int((~journal.done).sum())
    if missing:
        raise EngineError(f"the engine left {missing} of {len(plan)} windows without an answer", fix="run it again")


def check_divergence(index: int, kl: Floats | None) -> None:
    """Infinite is a divergence, NaN and less than nothing are not."""
    if kl is not None and not (kl >= 0).all():
        raise EngineError(f"the divergence in window {index} is not a number", fix="this is a fault of the engine")


def check_answers(index: int, window: Window, answers: Answers) -> None:
    """One number for each target, none of them NaN; minus infinity is a probability of zero, and allowed."""
    if answers.logprob.shape != window.targets.shape:
        raise EngineError(
            f"window {index} asked for {window.targets.shape} scores and got {answers.logprob.shape}",
            fix="this is a fault of the engine",
        )
    for column in (answers.logprob, answers.entropy, answers.top_logprob):
        bad = np.isnan(column) | (column == np.inf)
        if bad.any():
            row = int(np.argwhere(bad)[0][0])
            raise EngineError(
                f"the model gives NaN in window {index} at token {int(window.rows[row]) + 1}",
                fix="try --dtype float32; if it stays, the weights are damaged",
            )
