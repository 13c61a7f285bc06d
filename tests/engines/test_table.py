"""The engine whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scoremode.engines.table.engine import TableEngine
from scoremode.errors import ModelError
from scoremode.plan.windows import Answers, Window, WindowList, measured
from scoremode.values import Ids
from scoremode.verbs.ppl import ppl

COUNTING = "".join(map(chr, range(32, 127)))


def ask(engine: TableEngine, ids: Ids, rows: list[int], targets: list[list[int]]) -> Answers:
    window = Window(ids, np.array(rows, np.int32), np.array(targets, np.int32))
    ((_, answers),) = engine.score(WindowList((window,)), np.zeros(1, np.bool_))
    return answers


@pytest.mark.parametrize("size", [2, 3, 1000, 32_003])
def test_a_uniform_models_perplexity_is_its_vocabulary_to_the_digit(size: int) -> None:
    answers = ask(TableEngine(np.zeros((1, size))), np.array([1, 0], np.int32), [0], [[1]])
    assert f"{math.exp(-answers.logprob[0, 0]):.9f}" == f"{size:.9f}"
    assert measured(answers.entropy)[0] == pytest.approx(math.log(size))
    assert measured(answers.rank)[0, 0] == 2


def test_a_counting_text_scores_log_one_under_the_successor_table() -> None:
    run = ppl("table:successor", text=COUNTING)
    assert run.perplexity.value == 1.0
    assert run.top1_accuracy.value == 1.0
    assert (run.scores.logprob == 0).all()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_by_one_scores_log_zero(shift: int) -> None:
    """Proves that the test above would detect an alignment that is off by one, in either direction."""
    ids = np.arange(40, 60, dtype=np.int32)
    rows = np.arange(1, 18, dtype=np.int32)
    aligned = Window(ids, rows, ids[rows + 1][:, None])
    shifted = Window(ids, rows, ids[rows + 1 + shift][:, None])
    engine = TableEngine.named("successor")
    answers = dict(engine.score(WindowList((aligned, shifted)), np.zeros(2, np.bool_)))
    assert (answers[0].logprob == 0).all()
    assert np.isneginf(answers[1].logprob).all()


def test_several_targets_a_row() -> None:
    with np.errstate(divide="ignore"):
        engine = TableEngine(np.log(np.array([[0.5, 0.25, 0.25]])))
    answers = ask(engine, np.array([0], np.int32), [0], [[0, 1, 2]])
    assert np.exp(answers.logprob[0]).tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert measured(answers.rank)[0].tolist() == [1, 2, 3]


def test_windows_already_done_are_not_scored_again() -> None:
    windows = tuple(
        Window(np.array([i, i], np.int32), np.array([0], np.int32), np.array([[0]], np.int32)) for i in (1, 2)
    )
    engine = TableEngine.named("uniform")
    assert [i for i, _ in engine.score(WindowList(windows), np.array([True, False]))] == [1]


def test_an_unknown_table_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match="uniform"):
        TableEngine.named("unifrom")
