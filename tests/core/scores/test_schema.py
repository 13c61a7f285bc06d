"""The schema declares every column once: what it may hold, that the docs list the same, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.disk.manifests import sealed
from scoremode.core.scores.answers import Answers, Window, WindowList, check_answers, check_shapes
from scoremode.core.scores.schema import (
    BUILT_IN,
    DIVERGENCE,
    FACTS,
    ColumnSpec,
    Metric,
    chosen_divergences,
    contradiction,
    wrong_first_choice,
)
from scoremode.core.store.runs import MANIFEST
from scoremode.errors import EngineError, RunError

DOCS = Path(__file__).resolve().parents[3] / "docs"
MOST = math.log(100) + 1e-2  # entropy of 100 ids


def as_table(columns: Sequence[ColumnSpec]) -> str:
    """Columns as a table, as docs/scores.md and docs/runs.md have it."""
    lines = [f"| `{column.name}` | {column.meaning} |" for column in columns]
    return "\n".join(["| column | meaning |", "|---|---|", *lines])


def test_the_tables_of_the_docs_are_those_of_the_schema() -> None:
    assert as_table(BUILT_IN.scores) in (DOCS / "scores.md").read_text()
    assert as_table((*FACTS, *DIVERGENCE)) in (DOCS / "runs.md").read_text()


def test_a_run_with_columns_that_its_engine_declared_is_refused(tmp_path: Path) -> None:
    """Engines once could. Nothing of such a run is dropped silently."""
    sm.ppl("table:uniform", text="a few words", out=tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(sealed({**manifest, "columns": [{"name": "margin"}]})))
    with pytest.raises(RunError, match="columns that this scoremode does not read"):
        sm.load(tmp_path)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("name", "possible", "impossible"),
    [
        ("logprob", (-math.inf, 0.0, 1e-4), (1.01e-4, math.nan, math.inf)),
        ("rank", (1, 100), (0, 101)),
        ("entropy", (-1e-4, MOST), (-1.01e-4, MOST + 1e-6, math.inf, -math.inf, math.nan)),
        ("top", (0, 99), (-1, 100)),
        ("top_logprob", (-50.0, 1e-4), (1.01e-4, -math.inf, math.nan)),
        ("kl", (0.0, math.inf), (-1e-9, math.nan)),
        ("kl_reverse", (0.0, math.inf), (-1e-9, math.nan)),
        ("total_variation", (0.0, 1.0), (-1e-9, 1 + 1e-9, math.nan)),
        ("same_first", (0, 5), (-1, 6)),
    ],
)
def test_a_value_is_possible_up_to_its_bounds(name: str, possible: Any, impossible: Any) -> None:
    """Of a model with 100 ids; the value that is wrong is named, wherever it stands."""
    assert BUILT_IN.impossible_value({name: np.array(possible)}, 100) is None
    for value in impossible:
        column = np.array([possible[-1], value, possible[-1]])
        assert BUILT_IN.impossible_value({name: column}, 100) == f"{name.replace('_', ' ')} is {value:g}"
    assert BUILT_IN.impossible_value({name: np.array([])}, 100) is None


def test_without_a_vocabulary_ids_are_those_of_int32_and_a_divergence_may_have_another_least_value() -> None:
    assert BUILT_IN.impossible_value({"top": np.array([(1 << 31) - 1])}) is None
    assert BUILT_IN.impossible_value({"rank": np.array([1 << 31])}) is None
    assert BUILT_IN.impossible_value({"rank": np.array([(1 << 31) + 1])}) is not None
    assert BUILT_IN.impossible_value({"kl": np.array([-0.5])}, 100, -0.5) is None
    assert BUILT_IN.impossible_value({"kl_reverse": np.array([-0.5])}, 100, -0.5) is not None


FITTING = {"logprob": -3.0, "rank": 4, "entropy": 2.0, "top_logprob": -1.0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, None),
        ({"logprob": -math.inf}, None),
        ({"logprob": -1e39}, None),
        ({"logprob": -1.1e39}, "logprob is -1.1e+39"),
        ({"logprob": 0.0, "top_logprob": -0.01}, None),
        ({"logprob": -0.98}, "top logprob is -1, below the logprob -0.98 of a token"),
        ({"rank": 1, "logprob": -0.01, "top_logprob": 0.0}, None),
        ({"rank": 1, "logprob": -1.02}, "logprob is -1.02 at rank 1, and top logprob -1"),
        ({"rank": 2, "logprob": -1.02}, None),
        ({"entropy": 0.0, "top_logprob": -0.01}, None),
        ({"entropy": 0.98}, "entropy is 0.98, and top logprob -1"),
    ],
)
def test_columns_of_one_target_must_not_contradict_each_other(values: dict[str, float], words: str | None) -> None:
    """By more than a hundredth of a nat: servers round."""
    assert contradiction({n: np.array([v, {**FITTING, **values}[n]]) for n, v in FITTING.items()}) == words


def test_the_first_choice_alone_has_rank_1() -> None:
    targets, top = np.array([[7, 8], [9, 7]], np.int32), np.array([7, 7], np.int32)
    assert wrong_first_choice(targets, np.array([[1, 2], [5, 1]]), top) is None
    assert (
        wrong_first_choice(targets, np.array([[1, 1], [5, 1]]), top) == "token 8 has rank 1, and the first choice is 7"
    )
    assert (
        wrong_first_choice(targets, np.array([[1, 2], [5, 3]]), top) == "token 7 has rank 3, and the first choice is 7"
    )
    assert (
        wrong_first_choice(targets, None, top) is wrong_first_choice(targets, np.array([[2, 2], [2, 2]]), None) is None
    )


def test_a_metric_follows_from_the_declared_bounds_of_its_column() -> None:
    share, positive = ColumnSpec("float64", "", least=0, most=1, name="a"), ColumnSpec("float64", "", least=0, name="b")
    assert Metric("m", "m").range(share) == Metric("m", "m", share_of=1).range(positive) == "share"
    assert Metric("m", "m").range(positive) == "positive"
    assert Metric("m", "m").range(ColumnSpec("float64", "", least=-1, most=1)) == "any"
    assert Metric("m", "m").range(ColumnSpec("float64", "", most=1)) == "any"
    assert Metric("m", "m", share_of=1).values(np.array([1, 2, 1])).tolist() == [True, False, True]
    assert Metric("m", "m").values(np.array([1, 2])).tolist() == [1, 2]
    assert [metric.name for _, metric in BUILT_IN.metrics] == ["mean_rank", "top1_accuracy", "mean_entropy"]


# ── sets of columns, and shapes ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (BUILT_IN.names, None),
        (("logprob",), None),
        (("logprob", "entropy"), None),
        (("logprob", "top", "top_logprob"), None),
        (("rank",), "logprob is missing"),
        (("logprob", "margin"), "margin was not declared"),
        (("logprob", "top"), "top and top_logprob come together or not at all"),
        (("logprob", "top_logprob"), "top and top_logprob come together or not at all"),
    ],
)
def test_which_columns_an_engine_may_give(names: tuple[str, ...], words: str | None) -> None:
    assert BUILT_IN.set_problem(names) == words


def test_columns_are_chosen_in_the_order_of_the_schema() -> None:
    assert [column.name for column in BUILT_IN.chosen(["top", "rank", "kl"])] == ["rank", "top"]
    assert [column.name for column in chosen_divergences(("same_first", "kl", "rank"))] == ["kl", "same_first"]
    answers = Answers(np.zeros((2, 1)), kl=np.zeros(2), states=np.zeros((2, 3)), entropy=np.zeros(2))
    assert (answers.columns, answers.divergences) == (("logprob", "entropy"), ("kl",))
    assert [name for name, _ in answers.arrays()] == ["logprob", "entropy", "states", "kl"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, None),
        ({"logprob": np.zeros((2, 3))}, r"window 5 asked for \(2, 2\) scores and got \(2, 3\)"),
        ({"logprob": np.zeros(2)}, "scores and got"),
        ({"rank": np.ones((2, 1), np.int64)}, r"\(2, 2\) values of rank and got \(2, 1\)"),
        ({"entropy": np.zeros((2, 2))}, r"\(2,\) values of entropy and got \(2, 2\)"),
        ({"kl": np.zeros(3)}, r"\(2,\) values of kl and got \(3,\)"),
        ({"top": np.zeros(2, np.int32)}, "window 5 got wrong columns: top and top_logprob come together"),
    ],
)
def test_answers_have_the_shape_of_the_targets(columns: dict[str, Any], words: str | None) -> None:
    answers = Answers(**{"logprob": np.zeros((2, 2)), "rank": None, **columns})
    if words is None:
        check_shapes((2, 2), 5, answers)
        return
    with pytest.raises(EngineError, match=words):
        check_shapes((2, 2), 5, answers)


def test_the_window_with_the_wrong_value_is_named() -> None:
    window = Window(np.arange(6, dtype=np.int32), np.array([1, 4], np.int32), np.zeros((2, 1), np.int32))
    source = WindowList((window,) * 3)
    good = Answers(np.full((2, 1), -1.0), entropy=np.ones(2))
    check_answers(source, [(0, good), (1, good)], 100)
    check_answers(source, [], 100)
    wrong = {
        r"gives NaN in window 2 at token 5": Answers(np.array([[-1.0], [math.nan]]), entropy=np.ones(2)),
        r"gives NaN in window 2 at token 2": Answers(np.full((2, 1), -1.0), entropy=np.array([math.inf, 1.0])),
        r"no usable scores: in window 2 logprob is 3": Answers(np.array([[-1.0], [3.0]]), entropy=np.ones(2)),
    }
    for words, answers in wrong.items():
        with pytest.raises(EngineError, match=words):
            check_answers(source, [(0, good), (2, answers)], 100)
    top = {"top": np.zeros(2, np.int32), "top_logprob": np.full(2, -4.0)}
    with pytest.raises(EngineError, match="in window 1 top logprob is -4, below the logprob -1 of a token"):
        check_answers(source, [(1, Answers(np.full((2, 1), -1.0), **top))], 100)
    pair = WindowList((Window(window.ids, window.rows, np.zeros((2, 2), np.int32)),))
    check_answers(pair, [(0, Answers(np.full((2, 2), -5.0), **top))], 100)
    assert (len(source), source.lengths.tolist()) == (3, [6, 6, 6])
