"""Values behave: short in a prompt, a table in a notebook, numbers where a number is meant, and frames elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.store.run import Run
from scoremode.errors import InputError, OptionError
from scoremode.values import Estimate

TEXT = "the cat sat on the mat, the cat sat on the hat"


@pytest.fixture(scope="module")
def run() -> Run:
    return sm.ppl("table:successor", text=TEXT)


@pytest.fixture(scope="module")
def comparisons() -> sm.Comparisons:
    return sm.compare("table:uniform", "table:successor", "table:uniform", text=TEXT)


# ── estimates ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_estimate_is_formatted_like_its_value() -> None:
    estimate = Estimate(12.5, 0.25, 100, 10)
    assert (f"{estimate:.2f}", f"{estimate:>8.1f}", f"{estimate}") == ("12.50", "    12.5", "12.50 ± 0.25")
    assert (repr(Estimate(12.5, None, 10, 1)), float(estimate)) == ("12.50 ± ?", 12.5)


def test_an_estimate_compares_with_numbers_and_estimates() -> None:
    small, large = Estimate(12.5, 0.25, 100, 10), Estimate(20.0, None, 100, 10)
    assert small < 20
    assert small <= 12.5
    assert small > np.float32(3)
    assert small >= 12.5
    assert small < 20
    assert small < large
    assert sorted([large, small]) == [small, large]
    assert small == 12.5
    assert hash(small) == hash(12.5)
    assert small != 13
    assert small != Estimate(12.5, None, 100, 10), "all fields of two estimates count"
    assert not Estimate(math.nan, None, 1, 1) < 1
    with pytest.raises(TypeError):
        _ = small < "20"  # type: ignore[operator]


# ── reprs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_public_value_is_shown_in_five_lines(run: Run, comparisons: sm.Comparisons) -> None:
    long = "a long prompt " * 50
    values: list[Any] = [run, run.scores, run.facts, comparisons, comparisons[0], run.perplexity]
    values += [sm.Comparisons(), sm.Comparisons([comparisons[0]] * 30), sm.open("table:uniform")]
    values += [sm.prob("table:uniform", prompt=long, targets="b")[0], sm.SequenceProbability("table:uniform")]
    values += [noise := sm.noise("table:uniform", text=TEXT), noise.plan]
    for value in values:
        shown = repr(value).splitlines()
        assert len(shown) <= 5, shown
        assert max(map(len, shown)) <= 160, shown


def test_a_repr_says_what_matters_and_is_harmless(comparisons: sm.Comparisons, run: Run) -> None:
    assert "Run of table:successor on text" in repr(run)
    assert "2 compared with table:uniform" in repr(comparisons)
    bad = Run(run.plan_digest, run.scores, run.facts, {**run.manifest, "model": "a\x1b[2J\nb"})
    assert "\x1b" not in repr(bad)
    assert len(repr(bad).splitlines()) <= 5


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_comparisons_are_used_like_the_list_they_were(comparisons: sm.Comparisons) -> None:
    assert [c.name for c in comparisons] == ["table:successor", "table:uniform"]
    assert len(comparisons) == 2
    assert comparisons == list(comparisons)
    assert comparisons[-1].name == "table:uniform"
    assert isinstance(comparisons[:1], sm.Comparisons)


def test_a_notebook_shows_comparisons_as_one_table(comparisons: sm.Comparisons) -> None:
    html = str(comparisons._repr_html_())
    assert html.count("<table") == 1
    assert html.count("<tr>") == 4, "titles, the baseline, and two candidates"


# ── models that are loaded already ───────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def loaded(tiny: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)


def test_every_verb_wraps_a_loaded_model(loaded: tuple[Any, Any], tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded
    asked: dict[str, Any] = {"text": TEXT, "context_length": 16, "stride": 8}
    wrapped = sm.wrap(model, tokenizer)
    expected = wrapped.ppl(**asked)
    assert sm.ppl(model, tokenizer=tokenizer, **asked).perplexity == expected.perplexity
    assert sm.plan(model, tokenizer=tokenizer, **asked)["targets"] == len(expected.scores)
    named = sm.prob(str(tiny), prompt="the cat", targets=" sat", dtype="float32")[0].log_prob
    assert sm.prob(model, tokenizer=tokenizer, prompt="the cat", targets=" sat")[0].log_prob == pytest.approx(named)
    assert sm.noise(model, tokenizer=tokenizer, **asked).settings[0].repeats is not None
    with sm.open(model, tokenizer=tokenizer) as opened:
        assert opened.ppl(**asked).perplexity == expected.perplexity
    kept = sm.reference(model, tmp_path / "ref", tokenizer=tokenizer, **asked)
    assert kept.perplexity == expected.perplexity
    for baseline in (tmp_path / "ref", sm.open(str(tiny), dtype="float32")):
        question = {} if isinstance(baseline, Path) else asked
        assert wrapped.compare(baseline, **question).statistics()["kl_mean"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(InputError, match=r"compare the candidate by its own method: scoremode\.wrap"):
        sm.compare(tmp_path / "ref", model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "a model that is loaded needs its tokenizer; give the tokenizer itself"),
        ({"tokenizer": "org/model"}, "tokenizer is a string; give the tokenizer itself"),
        ({"tokenizer": ..., "dtype": "float16"}, "dtype does not apply to a model that is loaded already"),
        ({"tokenizer": ..., "engine": "vllm"}, "engine does not apply to a model that is loaded already"),
    ],
)
def test_what_a_loaded_model_cannot_take_is_refused(loaded: tuple[Any, Any], given: dict[str, Any], said: str) -> None:
    model, tokenizer = loaded
    named = {name: tokenizer if value is ... else value for name, value in given.items()}
    with pytest.raises(OptionError, match=said):
        sm.ppl(model, text=TEXT, **named)
