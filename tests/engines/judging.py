"""For the tests of every engine: windows of random ids, their scores, and the definition that judges them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from scoremode.core.engine.base import Wanted
from scoremode.core.scores.answers import Answers, Window, WindowList, WindowSource, measured, own_tokens
from scoremode.head.columns import define_columns
from scoremode.values import Ids
from tests.makers import VOCABULARY


def random_ids(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Ids:
    return np.random.default_rng(seed).integers(2, vocabulary, length).astype(np.int32)


def random_windows(*lengths: int, vocabulary: int = VOCABULARY) -> WindowList:
    """Windows of which every token but the first is a target."""
    ids = (random_ids(length, 1000 * place + length, vocabulary) for place, length in enumerate(lengths))
    return WindowList(tuple(map(own_tokens, ids)))


def scored(engine: Any, source: WindowSource, done: tuple[int, ...] = (), **want: Any) -> dict[int, Answers]:
    return dict(engine.score(source, np.isin(np.arange(len(source)), done), Wanted(**want)))


def all_scored(engine: Any, source: WindowSource, **want: Any) -> list[Answers]:
    answers = scored(engine, source, **want)
    assert sorted(answers) == list(range(len(source))), "each window exactly once"
    return [answers[index] for index in range(len(source))]


def assert_defined(answers: Answers, logits: torch.Tensor, window: Window, nats: float) -> None:
    """Every column is that of the definition in float64 for these logits (rows, vocabulary)."""
    columns = define_columns(logits, torch.from_numpy(window.targets.astype(np.int64)))
    for name in ("logprob", "entropy", "top_logprob"):
        assert np.abs(getattr(answers, name) - getattr(columns, name).numpy()).max() < nats, name
    assert np.array_equal(measured(answers.rank), columns.rank.numpy())
    assert np.array_equal(measured(answers.top), columns.top.numpy())
