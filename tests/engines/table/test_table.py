"""The engine whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scoremode.core.plan.build import plan_of_pairs
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Answers, Window, WindowList, measured
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.verbs.ppl import ppl
from scoremode.engines.table import engine as table
from scoremode.engines.table.engine import TableEngine
from scoremode.values import Floats, Ids

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


def longhand(logp: Floats, targets: Ids) -> Answers:
    """The definition, row by row: what the engine looks up must have these bits."""
    at_target = np.take_along_axis(logp, targets.astype(np.int64), axis=1)
    ids = np.arange(logp.shape[1])
    before = (logp[:, None, :] == at_target[:, :, None]) & (ids < targets[:, :, None])
    p = np.exp(logp)
    return Answers(
        logprob=at_target,
        rank=1 + ((logp[:, None, :] > at_target[:, :, None]) | before).sum(axis=2),
        entropy=-np.where(p > 0, p * np.where(p > 0, logp, 0.0), 0.0).sum(axis=1),
        top=logp.argmax(axis=1).astype(np.int32),
        top_logprob=logp.max(axis=1),
    )


def same(found: Answers, expected: Answers) -> None:
    for name in expected.columns:
        ours, theirs = measured(getattr(found, name)), measured(getattr(expected, name))
        assert ours.shape == theirs.shape, name
        assert np.array_equal(ours, theirs), name
    assert measured(found.rank).dtype == np.int64
    assert measured(found.top).dtype == np.int32


@pytest.mark.parametrize("vocabulary", [2, 7, 64, 257, 1003])
@pytest.mark.parametrize("kind", ["one line", "a line for each", "ties and zeros"])
def test_what_is_looked_up_has_the_bits_of_the_definition(vocabulary: int, kind: str) -> None:
    some = np.random.default_rng(vocabulary)
    logits = some.standard_normal((1 if kind == "one line" else vocabulary, vocabulary))
    if kind == "ties and zeros":
        logits = np.round(logits)
        logits[:, 1:][some.random((vocabulary, vocabulary - 1)) < 0.3] = -np.inf
    engine = TableEngine(logits)
    lengths = [2, 3, 2, 50, 400, 2]
    sequences = [
        (some.integers(0, vocabulary, n).astype(np.int32), min(first, n - 1)) for n in lengths for first in (1, 9)
    ]
    plan = plan_of_pairs(sequences, np.arange(len(sequences)) // 3)
    done = np.zeros(len(plan), np.bool_)
    done[[1, 4]] = True
    answered = dict(engine.score(plan, done))
    windows = WindowList(tuple(plan.window(i) for i in range(len(plan))))
    alone = dict(engine.score(windows, done))
    assert sorted(answered) == sorted(alone) == np.flatnonzero(~done).tolist()
    for index, answers in answered.items():
        window = plan.window(index)
        lines = window.ids[window.rows] if kind != "one line" else np.zeros(len(window.rows), np.int32)
        same(answers, longhand(engine.logprobs[lines], window.targets))
        same(alone[index], answers)


@pytest.mark.parametrize("column", ["rank", "entropy", "top"])
def test_a_column_without_a_closed_form_is_the_definition_of_the_head(
    column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a new column needs no line in this engine; and the two ways agree."""
    logits = np.random.default_rng(3).standard_normal((9, 9))
    ids = np.array([1, 4, 4, 0], np.int32)
    windows = WindowList((Window(ids, np.arange(3, dtype=np.int32), ids[1:, None]),))
    ((_, known),) = TableEngine(logits).score(windows, np.zeros(1, np.bool_))
    whole = table.closed_form
    monkeypatch.setattr(table, "closed_form", lambda logp: {n: x for n, x in whole(logp).items() if n != column})
    ((_, found),) = TableEngine(logits).score(windows, np.zeros(1, np.bool_))
    ours, theirs = measured(getattr(found, column)), measured(getattr(known, column))
    assert found.columns == known.columns == BUILT_IN.names
    assert ours.dtype == theirs.dtype
    assert np.allclose(ours, theirs, rtol=1e-12)


def test_a_lead_is_the_token_before_the_first_target() -> None:
    """A window whose first token is a target: its row is the lead's."""
    some = np.random.default_rng(5)
    engine, ids = TableEngine(some.standard_normal((9, 9))), some.integers(0, 9, 40).astype(np.int32)
    starts = np.array([0, 10, 20])
    plan = Plan(
        method="any",
        settings=(),
        ids=ids,
        doc_starts=np.array([0, 40]),
        start=starts,
        stop=starts + 9,
        first=starts + np.array([0, 0, 1]),
        last=starts + 10,
        lead=np.array([3, 8, -1], np.int32),
    )
    for index, answers in engine.score(plan, np.zeros(3, np.bool_)):
        window = plan.window(index)
        same(answers, longhand(engine.logprobs[window.ids[window.rows]], window.targets))


def test_several_targets_a_row() -> None:
    with np.errstate(divide="ignore"):
        engine = TableEngine(np.log(np.array([[0.5, 0.25, 0.25]])))
    answers = ask(engine, np.array([0], np.int32), [0], [[0, 1, 2]])
    assert np.exp(answers.logprob[0]).tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert measured(answers.rank)[0].tolist() == [1, 2, 3]
