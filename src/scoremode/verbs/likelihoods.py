"""Log-likelihoods of continuations: what tasks and harnesses ask for, many at a time.

Each is asked as ids that are split already; where the split lies is the caller's rule. ``verbs/prob/`` splits by
characters, ``harness/encoding.py`` as lm-evaluation-harness does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scoremode.engines.base import Engine
from scoremode.errors import EngineError
from scoremode.plan.build import plan_of_pairs
from scoremode.plan.windows import Answers
from scoremode.values import Bools, Ids, Ints
from scoremode.verbs.progress import Progress
from scoremode.verbs.scoring import answered, check_fits


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

    >>> import numpy as np
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
    for index, answers in answered(engine, plan, done, progress=progress):
        yield index, Likelihood(answers)


def no_more_than_certain(log_prob: float) -> float:
    """Rounding may carry a sum a little above 0. ``min(0.0, nan)`` would be 0, that is: certain."""
    if math.isnan(log_prob):
        raise EngineError("the model gives NaN", fix="try --dtype float32; if it stays, the weights are damaged")
    return min(0.0, log_prob)
