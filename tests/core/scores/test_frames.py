"""Results as tables of other libraries, and in a few lines."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scoremode as sm
from scoremode.core import extensions
from scoremode.core.scores.columns import Divergences, Scores
from scoremode.core.scores.frames import WIDEST, few_lines
from scoremode.core.store.run import Run
from scoremode.errors import OptionError
from tests.partial_engine import PartialEngine

TEXT = "the cat sat on the mat, the cat sat on the hat"


@pytest.fixture(scope="module")
def run() -> Run:
    return sm.ppl("table:successor", text=TEXT)


@pytest.fixture(scope="module")
def comparisons() -> sm.Comparisons:
    return sm.compare("table:uniform", "table:successor", "table:uniform", text=TEXT)


def test_long_lines_are_cut_empty_ones_left_out_and_control_characters_harmless() -> None:
    assert few_lines("a", "", "b\x1b") == "a\nb\ufffd"
    assert few_lines("x" * WIDEST) == "x" * WIDEST
    assert few_lines("x" * (WIDEST + 1)) == "x" * (WIDEST - 1) + "…"
    assert WIDEST == 110


def test_text_and_top_text_compare_in_pandas(run: Run, comparisons: sm.Comparisons) -> None:
    pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert (frame.text == frame.top_text).tolist() == (np.asarray(run.scores.rank) == 1).tolist()
    both = comparisons[0].to_pandas()
    assert (both.text == both.top_text_candidate).tolist() == (frame.text == frame.top_text).tolist()
    assert (both.top_text_baseline == both.top_text_candidate).sum() < len(both)


def test_text_compares_with_a_top_text_that_was_not_measured() -> None:
    pytest.importorskip("pandas")
    frame = sm.ppl("table:uniform", text=TEXT, engine=PartialEngine("rank")).to_pandas()
    assert not (frame.text == frame.top_text).any()


def test_a_comparison_has_the_scores_of_both_and_comparisons_a_row_per_candidate(comparisons: sm.Comparisons) -> None:
    first = comparisons[0]
    table = first.to_arrow()
    for side, its in (("baseline", first.baseline), ("candidate", first.candidate)):
        assert np.array_equal(table[f"logprob_{side}"].to_numpy(), its.scores.logprob)
    assert table["text"].to_pylist() == first.candidate.facts.text.tolist()
    table = comparisons.to_arrow()
    assert table["name"].to_pylist() == ["table:successor", "table:uniform"]
    assert table["ppl_ratio"].to_pylist() == [None, 1.0]
    assert table["model_format"].type == pa.string()


def test_anything_that_reads_arrow_reads_values(run: Run, comparisons: sm.Comparisons) -> None:
    for value in (run, comparisons, comparisons[0]):
        assert pa.table(value).equals(value.to_arrow())
        assert pa.RecordBatchReader.from_stream(value).read_all().num_rows == len(value.to_arrow())


def test_polars_reads_values(run: Run, comparisons: sm.Comparisons) -> None:
    polars = pytest.importorskip("polars", reason="needs polars")
    frame = run.to_polars()
    assert frame.filter(polars.col("text") == polars.col("top_text")).height == int(
        (np.asarray(run.scores.rank) == 1).sum()
    )
    assert polars.DataFrame(run).shape == frame.shape
    assert comparisons.to_polars()["name"].to_list() == ["table:successor", "table:uniform"]


def test_a_missing_library_is_one_clear_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        if name == "polars":
            raise ModuleNotFoundError("No module named 'polars'", name="polars")
        return import_module(name)

    monkeypatch.setattr("scoremode.core.scores.frames.import_module", absent)
    with pytest.raises(OptionError, match=r"polars is not installed; pip install polars, or use to_arrow\(\)"):
        run.to_polars()


class TableOffer(extensions.PageOffer):
    def load(self) -> Any:
        return SimpleNamespace(table=lambda result: self.code)


def test_a_notebook_shows_the_first_table_that_a_wing_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = sm.ppl("table:uniform", text="the cat sat")
    shows = ("core.store.run:Other",), ("core.store.run:Run",), ("core.store.run:Run",)
    offers = tuple(TableOffer(shows=names, code=f"<{number}>") for number, names in enumerate(shows))
    monkeypatch.setattr(extensions, "wings", lambda: (extensions.Wing(offers=offers),))
    assert run._repr_html_() == "<1>"
    monkeypatch.setattr(extensions, "wings", tuple)
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
