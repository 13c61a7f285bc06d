"""Comparisons whose models belong to different engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.registry import engine_for
from scoremode.errors import CandidatesError, InputError, OptionError, RunError
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import make_tiny_model

TEXT = "The quick brown fox jumps over 12345 lazy dogs, and the dog does not mind. " * 6
ASKED: Any = {"text": TEXT, "context_length": 48}


@pytest.fixture(scope="module", autouse=True)
def _llamacpp() -> None:
    require_llamacpp()


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of(tiny, tmp_path_factory.mktemp("made") / "made.gguf")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), adds_bos=False, num_hidden_layers=1)


def test_an_option_that_no_engine_of_the_comparison_has_is_left_to_be_refused(tiny: Path, made: Path) -> None:
    with pytest.raises(OptionError, match="--quantization does not apply"):
        sm.compare(str(tiny), str(made), quantization="awq", **ASKED)
    with pytest.raises(OptionError, match="nonsense"):
        sm.compare(str(tiny), str(made), **{**ASKED, "nonsense": 1})
    with pytest.raises(OptionError, match="--threads does not apply to the transformers engine"):
        sm.compare(str(tiny), str(tiny), threads=1, **ASKED)


def test_an_engine_by_name_is_for_the_models_that_it_can_score(tiny: Path, made: Path) -> None:
    assert engine_for("transformers", str(made)).name == "llamacpp"
    assert engine_for(None, str(tiny)).name == "transformers"
    for engine in ("nope", "llamacpp"):
        with pytest.raises(OptionError):
            engine_for(engine, str(tiny))
    with pytest.raises(OptionError, match=r"the transformers engine cannot score .*use --engine llamacpp"):
        sm.ppl(str(made), engine="transformers", **ASKED)


# ── end to end ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_one_comparison_of_models_of_two_engines(tiny: Path, made: Path, other: Path) -> None:
    options: Any = {"threads": 1, "cache_type_k": "f32", "cache_type_v": "f32", "dtype": "float32"}
    same, less = sm.compare(str(tiny), str(made), str(other), **options, **ASKED)
    assert same.kl is not None
    assert less.kl is not None
    assert np.abs(same.kl).max() < 1e-7
    assert less.kl.mean() > 0.1
    (alone,) = sm.compare(str(tiny), str(made), engine="transformers", **options, **ASKED)
    assert alone.kl is not None
    assert np.abs(alone.kl - same.kl).max() < 1e-7, "side by side, and against a stored reference"


# ── tokenizers ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ids_that_differ_are_refused_where_they_first_do_and_one_tokenizer_for_both_helps(
    tiny: Path, tmp_path: Path
) -> None:
    """The same vocabulary; this one never joins a digit to another."""
    digits = gguf_of(tiny, tmp_path / "digits.gguf", pre="smollm")
    words = r"other ids from character 30 on, at ' 12345 lazy dogs.*'; \d+ tokens in the baseline and \d+ in the candi"
    with pytest.raises(InputError, match=words):
        sm.compare(str(tiny), str(digits), **ASKED)
    with pytest.raises(CandidatesError, match=words) as error:
        sm.compare(str(tiny), str(digits), str(tiny), **ASKED)
    assert (list(error.value.found), list(error.value.failed)) == ([str(tiny)], [str(digits)])
    (found,) = sm.compare(str(tiny), str(digits), tokenizer=str(tiny), **ASKED)
    assert found.kl is not None
    assert np.abs(found.kl).max() < 1e-2


def test_equal_ids_are_enough_even_if_the_tokenizers_have_different_names(tiny: Path, tmp_path: Path) -> None:
    renamed = make_tiny_model(tmp_path / "renamed", adds_bos=False)
    file = renamed / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["added_tokens"][1]["content"] = "<end>"
    stored["model"]["vocab"]["<end>"] = stored["model"]["vocab"].pop("</s>")
    file.write_text(json.dumps(stored))
    made = gguf_of(renamed, tmp_path / "renamed.gguf")
    (found,) = sm.compare(str(tiny), str(made), **ASKED)
    assert found.kl is not None
    assert np.abs(found.kl).max() < 1e-2
    same = gguf_of(tiny, tmp_path / "same.gguf")
    first, second = sm.compare(str(same), str(made), str(tiny), **ASKED, out=tmp_path / "out")
    assert first.baseline.manifest["identity"] == second.baseline.manifest["identity"], "one baseline, one run"


# ── finished runs ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_model_beside_finished_runs_makes_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    sm.ppl("table:uniform", text="any text", out=tmp_path / "run")
    (found,) = sm.compare("table:successor", tmp_path / "run", text="any text")
    assert found.baseline.manifest["model"] == "table:successor"
    assert [one.name for one in (tmp_path / "cache").iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"text": "another text"}, "--text"),
        ({"baseline_engine": "table"}, "--baseline-engine"),
        ({"baseline_options": {"dtype": "float32"}}, "--baseline-dtype"),
        ({"engine": "table"}, "--engine"),
        ({"dtype": "float32"}, "--dtype"),
    ],
)
def test_arguments_that_finished_runs_do_not_need_are_refused(tmp_path: Path, given: Any, named: str) -> None:
    sm.ppl("table:uniform", text="any text", out=tmp_path / "run")
    sm.reference("table:uniform", tmp_path / "reference", text="any text")
    for baseline in (tmp_path / "run", tmp_path / "reference"):
        with pytest.raises(OptionError, match=f"leave {named} out"):
            sm.compare(baseline, tmp_path / "run", **given)


def test_an_unfinished_reference_is_no_model(tmp_path: Path) -> None:
    sm.reference("table:uniform", tmp_path, text="any text")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(RunError, match="is not a run"):
        sm.compare(tmp_path, "table:successor")


def test_a_finished_run_that_does_not_fit_loses_no_other_result(tmp_path: Path) -> None:
    sm.ppl("table:uniform", text="another text", out=tmp_path / "run")
    with pytest.raises(CandidatesError) as error:
        sm.compare(Path("table:uniform"), "table:successor", tmp_path / "run", text="any text")
    assert list(error.value.found) == ["table:successor"]
    assert "different plans" in str(error.value.failed[str(tmp_path / "run")])


def test_a_baseline_that_is_no_name_is_refused() -> None:
    run = sm.ppl("table:uniform", text="any text")
    with pytest.raises(OptionError, match=r"baseline is .*, which is not a string or a path"):
        sm.compare(run, "table:successor", text="any text")
    with sm.open("table:successor") as model, pytest.raises(InputError, match="this run is not kept on disk"):
        model.compare(replace(run, path=None), text="any text")
