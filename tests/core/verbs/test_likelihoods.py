"""Log-likelihoods of many continuations: each once, each a number, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode.core.engine.base import SCORES, Wanted
from scoremode.core.plan.build import plan_of_pairs
from scoremode.core.scores.answers import Answers, WindowSource, measured
from scoremode.core.verbs.scoring import Continuation, Likelihood, answered, likelihoods
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, ModelError
from scoremode.values import Bools
from tests.partial_engine import LOGITS, PartialEngine

ASKED = [Continuation(np.array([1, 2, 3, 4], np.int32), 2), Continuation(np.array([1, 2, 9], np.int32), 2)]
GROUPS = np.zeros(2, np.int64)


def definition(asked: Continuation) -> float:
    logits = LOGITS[0].astype(np.float64)
    rows = logits - np.log(np.exp(logits).sum())
    return float(math.fsum(rows[asked.ids[asked.first :]].tolist()))


def test_sums_greedy_flags_and_the_tokens_that_are_fed() -> None:
    best, told = int(LOGITS[0].argmax()), list[tuple[int, int]]()
    asked = [*ASKED, Continuation(np.array([1, best, best], np.int32), 1)]
    found = dict(likelihoods(TableEngine(LOGITS), asked, np.array([0, 0, 1]), lambda *now: told.append(now)))
    assert [found[i].log_prob for i in range(3)] == pytest.approx([definition(one) for one in asked], abs=1e-9)
    assert [found[i].is_greedy for i in range(3)] == [False, False, True]
    assert told[-1] == (7, 7)
    assert [one.is_greedy for _, one in likelihoods(PartialEngine(), ASKED, GROUPS)] == [None, None], "without ranks"
    assert list(likelihoods(TableEngine(LOGITS), [], np.zeros(0, np.int64))) == []
    with pytest.raises(ModelError, match="id 300"):
        list(likelihoods(TableEngine(LOGITS), [Continuation(np.array([1, 300], np.int32), 1)], np.zeros(1, np.int64)))
    certain: Any = Answers(np.array([[1e-9]]))
    assert Likelihood(certain).log_prob == 0.0


class Faulty(TableEngine):
    """Answers a window twice, or not at all, or with NaN."""

    def __init__(self, fault: str) -> None:
        super().__init__(LOGITS)
        self.fault = fault

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        for index, answers in super().score(source, done, want):
            if self.fault == "nan":
                yield index, Answers(np.full_like(answers.logprob, np.nan))
            elif self.fault == "entropy" and index == 1:
                yield index, replace(answers, entropy=np.full_like(measured(answers.entropy), np.inf))
            elif self.fault == "short" and index == 1:
                yield index, replace(answers, logprob=answers.logprob[1:])
            elif self.fault != "missing" or index == 0:
                yield index, answers
            if self.fault == "twice":
                yield index, answers


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("twice", "answered twice"),
        ("missing", "1 of 2 windows without an answer"),
        ("nan", "NaN in window 0"),
        ("entropy", "NaN in window 1"),
        ("short", "window 1 asked for"),
    ],
)
@pytest.mark.parametrize("together", [1, 2, 256])
def test_faults_of_engines_are_errors(fault: str, words: str, together: int) -> None:
    plan = plan_of_pairs([(one.ids, one.first) for one in ASKED], GROUPS)
    with pytest.raises(EngineError, match=words):
        list(answered(Faulty(fault), plan, together=together))
