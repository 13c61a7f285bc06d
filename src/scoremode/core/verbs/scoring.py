"""The only loop that feeds windows to an engine, and the runs that are scored with it.

with UnfinishedRun(planned, engine, claim, progress) as run:    the folder is taken over, the journal is opened
    run.score(want)                                           every window that the journal lacks
    manifest = run.manifest()                                 the numbers, and where they come from
    return run.save(manifest)                                 columns, manifest; then the journal is removed

``prob`` and harnesses request continuations: ids that the caller has already split, by its own rule.
``verbs/prob/`` splits by characters, ``studies/tasks/encoding.py`` as lm-evaluation-harness does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from scoremode.core.engine.base import SCORES, Engine, Wanted
from scoremode.core.plan.build import plan_of_pairs
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import FAULT, Answers, WindowSource, check_answers
from scoremode.core.scores.journal import Journal
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress, announce
from scoremode.core.verbs.run_contents import make_manifest, rows_to_keep
from scoremode.errors import EngineError, ModelError, UntrustedError, listed
from scoremode.values import Bools, Ids, Ints


def check_ids(largest: int, vocabulary: int | None) -> None:
    if vocabulary is not None and largest >= vocabulary:
        raise ModelError(
            f"the tokenizer gives id {largest}, but the model's vocabulary ends at {vocabulary - 1}",
            fix="the tokenizer does not belong to this model: give the right folder with --tokenizer",
        )


def check_fits(plan: Plan, vocabulary: int | None, context: int | None) -> None:
    """Refuses a plan that a model cannot score: ids outside its vocabulary, windows longer than its context."""
    check_ids(plan.largest_id, vocabulary)
    longest = int(plan.lengths.max(initial=0))
    if context is not None and longest > context:
        raise ModelError(
            f"a window of {longest} tokens is longer than the model's context of {context}",
            fix="shorten the prompt" if plan.method == "sequence" else f"give --context-length {context}",
        )


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def answered(
    engine: Engine,
    source: WindowSource,
    done: Bools | None = None,
    want: Wanted = SCORES,
    *,
    progress: Progress | None = None,
    together: int = 1,
) -> Iterator[tuple[int, Answers]]:
    """Yields the answers to windows not ``done``, as they come: each once, without NaN, all with the same columns.

    ``together`` answers are checked, and then yielded, at a time: for many short windows that is much faster.
    ``progress`` is called for a window when the caller requests the next one.
    """
    waiting = np.ones(len(source), dtype=np.bool_) if done is None else ~done
    lengths = source.lengths
    fed, total = int(lengths[~waiting].sum()), int(lengths.sum())
    columns: tuple[str, ...] | None = None
    engine.watch = None if progress is None else lambda tokens: progress(min(fed + tokens, total), total)
    coming = engine.score(source, ~waiting, want) if waiting.any() else iter(())
    least_kl = getattr(want.against, "least_kl", 0.0)
    while found := _next_answers(coming, waiting, together):
        check_answers(source, found, engine.facts.vocabulary, least_kl)
        for index, answers in found:
            if want.against is not None and answers.kl is None:
                raise EngineError(f"window {index} has no divergence", fix=FAULT)
            own = answers.columns
            columns = columns or own
            if own != columns:
                given, before = listed(own), listed(columns)
                raise EngineError(f"window {index} has {given}, and windows before it have {before}", fix=FAULT)
        for index, answers in found:
            yield index, answers
            fed += int(lengths[index])
            if progress:
                progress(fed, total)
    engine.watch = None  # what it computes from now on is not counted
    missing = int(waiting.sum())
    if missing:
        raise EngineError(f"the engine left {missing} of {len(source)} windows without an answer", fix="run it again")


def _next_answers(coming: Iterator[tuple[int, Answers]], waiting: Bools, count: int) -> list[tuple[int, Answers]]:
    """Returns the next ``count`` answers, fewer at the end; marks their windows as no longer waiting."""
    found: list[tuple[int, Answers]] = []
    while len(found) < count and (item := next(coming, None)) is not None:
        index = item[0]
        if not 0 <= index < len(waiting):
            raise EngineError(f"the engine answered window {index} of {len(waiting)}", fix=FAULT)
        if not waiting[index]:
            raise EngineError(f"window {index} was answered twice", fix=FAULT)
        waiting[index] = False
        found.append(item)
    return found


# ── continuations ────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """A context and its continuation as ids. The ids from ``first`` on are scored; ``first`` is 1 or more."""

    ids: Ids
    first: int

    @property
    def fed(self) -> int:
        """The number of tokens that the model is given; the last token is only scored."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Likelihood:
    """The likelihood of one continuation: a row of answers for each of its tokens.

    >>> import numpy as np
    >>> half = Likelihood(Answers(np.log([[0.5], [0.25]]), rank=np.array([[1], [2]])))
    >>> round(half.log_prob, 6), half.is_greedy
    (-2.079442, False)
    """

    answers: Answers

    @property
    def log_prob(self) -> float:
        """The log-probability of the continuation in nats: the sum over its tokens."""
        return no_more_than_certain(math.fsum(self.answers.logprob[:, 0].tolist()))

    @property
    def is_greedy(self) -> bool | None:
        """Is every token the model's first choice? Ties go to the lower id. None if ranks were not measured."""
        return None if self.answers.rank is None else bool((self.answers.rank[:, 0] == 1).all())


def likelihoods(
    engine: Engine,
    continuations: Sequence[Continuation],
    groups: Ints,
    progress: Progress | None = None,
    *,
    together: int = 1,
) -> Iterator[tuple[int, Likelihood]]:
    """Yields (index, likelihood) of every continuation, as they come, each exactly once.

    Continuations with equal numbers in ``groups`` share a context, which the engine computes once. Give each
    question its own number to keep its choices together. For ``together``, see ``answered``.
    """
    if not len(continuations):
        return
    plan = plan_of_pairs([(one.ids, one.first) for one in continuations], groups)
    check_fits(plan, engine.facts.vocabulary, engine.facts.context_length)
    for index, answers in answered(engine, plan, progress=progress, together=together):
        yield index, Likelihood(answers)


def no_more_than_certain(log_prob: float) -> float:
    """Limits a log-probability to 0, which rounding may exceed. NaN is refused, because ``min`` would make it 0."""
    if math.isnan(log_prob):
        raise EngineError("the model gives NaN", fix="try --dtype float32; if it stays, the weights are damaged")
    return min(0.0, log_prob)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class UnfinishedRun:
    """A question that is being scored with an open engine, into a folder that was claimed."""

    def __init__(
        self,
        planned: PlannedQuestion,
        engine: Engine,
        claim: runs.Claim,
        progress: Progress | None = None,
    ) -> None:
        check_fits(planned.plan, engine.facts.vocabulary, engine.facts.context_length)
        shown = {"corpus": planned.corpus.name, "method": planned.plan.method, "engine": engine.facts.engine}
        claim.begin({"model": planned.subject.name, **shown})
        self.planned, self.engine, self.claim = planned, engine, claim
        self.progress = progress
        self.journal = Journal(claim.folder / runs.JOURNAL, claim.identity, planned.plan.target_counts)
        self._last = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        if isinstance(error, UntrustedError):  # else the same command would go on from what was kept
            self.forget_except(np.zeros(len(self.planned.plan), np.bool_))
        self.journal.close()

    def forget_except(self, complete: Bools) -> None:
        """Forgets the scores of windows whose other data, such as hidden states, is not ``complete`` (windows,).

        After a kill, the journal may contain the scores of such windows. They are scored again.
        """
        for window in np.flatnonzero(self.journal.done & ~complete).tolist():
            self.journal.forget(window)

    def answers(self, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        """Yields the answers to windows that the journal lacks. The caller passes each answer to ``keep``."""
        announce(self.progress, "scoring")
        plan, done = self.planned.plan, self.journal.done.copy()
        if self.progress:
            self.progress(int(plan.lengths[done].sum()), plan.forward_tokens)
        self._last = time.perf_counter()
        yield from answered(self.engine, plan, done, want, progress=self.progress)

    def keep(self, index: int, answers: Answers, seconds: float | None = None) -> None:
        """Writes a window's scores into the journal. Without ``seconds``, the time since the last window counts."""
        now = time.perf_counter()
        self.journal.add(index, answers, now - self._last if seconds is None else seconds)
        self._last = now

    def score(self, want: Wanted = SCORES) -> None:
        """Scores every window that the journal lacks."""
        for index, answers in self.answers(want):
            self.keep(index, answers)

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest: the numbers, and where they come from."""
        announce(self.progress, "computing statistics and saving")
        engine = self.engine
        return make_manifest(self.planned, engine.facts, self.journal, self.claim.identity, engine.account())

    def save(self, manifest: Mapping[str, Any]) -> Run:
        """Saves the finished run in its folder and returns it."""
        return self.claim.publish(self.claim.save(rows_to_keep(self.planned, self.journal), manifest))


def score_run(planned: PlannedQuestion, engine: Engine, claim: runs.Claim, progress: Progress | None = None) -> Run:
    """Scores a question with an open engine into a claimed folder."""
    with UnfinishedRun(planned, engine, claim, progress) as run:
        run.score()
        return run.save(run.manifest())
