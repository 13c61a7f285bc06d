"""Log-likelihoods of continuations: what tasks and harnesses ask for, many at a time.

Each is asked as ids that are split already; where the split lies is the caller's rule. ``verbs/prob.py`` splits by
characters, ``harness/encoding.py`` as lm-evaluation-harness does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.engines.base import Engine
from scoremode.errors import EngineError
from scoremode.plan.making import plan_of_pairs
from scoremode.plan.windows import Answers, WindowSource
from scoremode.scores.answers import check_answers
from scoremode.scores.schema import joined_names
from scoremode.values import Bools, Ids, Ints
from scoremode.verbs.progress import Progress
from scoremode.verbs.scoring import check_fits


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """A context and its continuation as ids. Those from ``first`` on are scored; ``first`` is 1 or more."""

    ids: Ids
    first: int

    @property
    def fed(self) -> int:
        """Tokens that the model is given: the last one is only scored."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Likelihood:
    """What a model thinks of one continuation: a line of answers for each of its tokens.

    >>> half = Likelihood(Answers(np.log([[0.5], [0.25]]), rank=np.array([[1], [2]])))
    >>> round(half.log_prob, 6), half.is_greedy
    (-2.079442, False)
    """

    answers: Answers

    @property
    def log_prob(self) -> float:
        """Nats: the sum over its tokens."""
        return no_more_than_certain(math.fsum(self.answers.logprob[:, 0].tolist()))

    @property
    def is_greedy(self) -> bool | None:
        """Is every token the model's first choice? Ties go to the lower id. None: ranks were not measured."""
        return None if self.answers.rank is None else bool((self.answers.rank[:, 0] == 1).all())


def likelihoods(
    engine: Engine,
    asked: Sequence[Continuation],
    groups: Ints,
    done: Bools | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Likelihood]]:
    """The likelihood of every continuation that is not ``done``, with its index, as they come: each exactly once.

    Continuations with equal numbers in ``groups`` share a context, and the engine computes it once. A number of its
    own for every question keeps its choices together.
    """
    if not len(asked):
        return
    plan = plan_of_pairs([(one.ids, one.first) for one in asked], groups)
    check_fits(plan, engine.facts.vocabulary, engine.facts.context_length)
    for index, answers in answered_once(engine, plan, done, progress):
        yield index, Likelihood(answers)


def answered_once(
    engine: Engine,
    source: WindowSource,
    done: Bools | None = None,
    progress: Progress | None = None,
    together: int = 1,
) -> Iterator[tuple[int, Answers]]:
    """The answers of windows that are not ``done``, as they come: each once, all numbers, all with the same columns.

    ``together`` of them are checked, and then given, at a time: for many short windows that is much faster.
    """
    lengths, schema = source.lengths, engine.facts.schema
    waiting = np.ones(len(source), dtype=np.bool_) if done is None else ~done
    fed, total = int(lengths[~waiting].sum()), int(lengths.sum())
    columns: tuple[str, ...] | None = None
    found: list[tuple[int, Answers]] = []
    for index, answers in engine.score(source, ~waiting) if waiting.any() else ():
        if not waiting[index]:
            raise EngineError(f"window {index} was answered twice", fix="this is a fault of the engine")
        given = answers.columns
        columns = columns or given
        if given != columns:
            raise EngineError(
                f"window {index} has {joined_names(given)}, and windows before it have {joined_names(columns)}",
                fix="this is a fault of the engine",
            )
        waiting[index] = False
        fed += int(lengths[index])
        if progress:
            progress(fed, total)
        found.append((index, answers))
        if len(found) >= together:
            check_answers(schema, source, found)
            yield from found
            found = []
    check_answers(schema, source, found)
    yield from found
    missing = int(waiting.sum())
    if missing:
        raise EngineError(f"the engine left {missing} of {len(source)} windows without an answer", fix="run it again")


def no_more_than_certain(log_prob: float) -> float:
    """Rounding may carry a sum a little above 0. ``min(0.0, nan)`` would be 0, that is: certain."""
    if math.isnan(log_prob):
        raise EngineError("the model gives NaN", fix="try --dtype float32; if it stays, the weights are damaged")
    return min(0.0, log_prob)
