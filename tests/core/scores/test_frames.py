"""Results as tables of other libraries, and in a few lines."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import scoremode as sm
from scoremode.core import extensions
from scoremode.core.scores.columns import Divergences, Scores
from scoremode.core.scores.frames import WIDEST, few_lines
from scoremode.errors import OptionError


def test_long_lines_are_cut_empty_ones_left_out_and_control_characters_harmless() -> None:
    assert few_lines("a", "", "b\x1b") == "a\nb\ufffd"
    assert few_lines("x" * WIDEST) == "x" * WIDEST
    assert few_lines("x" * (WIDEST + 1)) == "x" * (WIDEST - 1) + "…"
    assert WIDEST == 110


def test_a_run_is_a_table_of_pandas_and_polars(monkeypatch: pytest.MonkeyPatch) -> None:
    run = sm.ppl("table:uniform", text="the cat sat", context_length=4, stride=4)
    frame, other = run.to_pandas(), run.to_polars()
    assert isinstance(frame, pd.DataFrame)
    assert isinstance(other, pl.DataFrame)
    assert len(frame) == len(other) == len(pl.DataFrame(run)) == len(run.scores)
    assert (frame.text == frame.top_text).sum() == (other["text"] == other["top_text"]).sum()
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(OptionError, match="polars is not installed"):
        run.to_polars()


def test_a_notebook_shows_the_first_table_that_a_wing_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = sm.ppl("table:uniform", text="the cat sat")
    tables: list[Any] = [lambda value: None, lambda value: "<table>", lambda value: "<other>"]
    monkeypatch.setattr(extensions, "offered", lambda kind: tables if kind == "notebook" else [])
    assert run._repr_html_() == "<table>"
    tables.clear()
    assert run._repr_html_() is None


def test_columns_say_which_were_measured() -> None:
    scores = Scores(np.zeros(1200), entropy=np.zeros(1200))
    assert repr(scores) == "Scores(1,200 targets: logprob, entropy)"
    assert repr(Divergences()) == "Divergences(not measured)"
    assert [scores.has(name) for name in ("logprob", "rank", "made_up")] == [True, False, False]
    assert (len(scores), Divergences(kl=np.zeros(3)).measured) == (1200, ("kl",))
    stored = sm.load(sm.ppl("table:uniform", text="the cat sat").path or "").scores
    assert repr(stored) == "Scores(10 targets: logprob, rank, entropy, top, top_logprob)"
    assert [stored.has(name) for name in ("rank", "made_up")] == [True, False]
