"""From a model's name and a text to a Run, whose two columns of texts have equal texts for equal ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.core.verbs.planned import identify
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import OptionError, RunError
from scoremode.values import NUMERICS
from tests import rounding
from tests.gguf_files import gguf_of
from tests.makers import ask


def test_progress_of_an_engine_of_ones_own_is_told_and_its_options_are_refused(tmp_path: Path) -> None:
    engine, seen = TableEngine(np.zeros((1, 256))), []
    asked: dict[str, Any] = {"text": "abcdefgh" * 4, "context_length": 8, "stride": 8, "engine": engine}
    sm.ppl("table:uniform", progress=lambda done, total: seen.append((done, total)), **asked)
    total = sm.plan("table:uniform", **{**asked, "engine": None})["forward_tokens"]
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    for options in ({"dtype": "float32"}, {"batch_tokens": 5}, {"device": "cpu"}):
        with pytest.raises(OptionError, match="already open"):
            sm.ppl("table:uniform", **asked, **options)
    sm.ppl("table:uniform", out=tmp_path / "run", **asked)
    with pytest.raises(RunError, match="contains another run"):
        sm.ppl("table:uniform", out=tmp_path / "run", **asked)
    assert not sm.ppl("table:uniform", out=tmp_path / "run", fresh=True, **asked).cached


# ── what makes a run this one ────────────────────────────────────────────────────────────────────────────────────────
def test_a_limit_that_leaves_the_same_windows_is_the_same_question(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"text": "abcdefgh" * 4, "context_length": 8, "stride": 8}
    count = sm.plan("table:uniform", max_windows=0, **asked)["windows"]
    limits = (0, count, count - 1)
    every, all_of_them, fewer = (sm.plan("table:uniform", max_windows=n, **asked)["plan_digest"] for n in limits)
    assert every == all_of_them != fewer
    sm.ppl("table:uniform", max_windows=0, out=tmp_path / "run", **asked)
    again = sm.ppl("table:uniform", max_windows=count, out=tmp_path / "run", **asked)
    assert (again.cached, again.manifest["method_settings"]["max_windows"]) == (True, count)


def test_another_version_of_the_numbers_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a text for two versions of the numbers"
    first = sm.ppl("table:uniform", text=text)
    assert first.manifest["identity"]["numerics"] == NUMERICS
    assert "scoremode" not in first.manifest["identity"]["versions"]
    assert first.manifest["versions"]["scoremode"] == sm.__version__
    monkeypatch.setattr("scoremode.core.verbs.planned.NUMERICS", NUMERICS + 1)
    assert not sm.ppl("table:uniform", text=text).cached


def test_secrets_are_used_but_never_kept() -> None:
    asked = ask("table:uniform", text="abc")
    given = {"engine_args": (("hf_token", "hf_SECRET"), ("seed", 1), ("overrides", {"api_key": "SECRET"}))}
    identity = identify(asked.subject, "vllm", {**given, "max_num_batched_tokens": 64})
    assert "SECRET" not in json.dumps(identity)
    assert identity["settings"]["max_num_batched_tokens"] == 64
    assert ["seed", 1] in identity["settings"]["engine_args"]
    assert identity == json.loads(json.dumps(identity)), "what is stored compares equal to what is asked"


def test_a_plan_is_the_same_for_every_engine_and_before_weights_are_loaded(tiny: Path) -> None:
    question: dict[str, Any] = {"text": "The dog and the fox and the cats of 1999", "context_length": 8, "stride": 4}
    planned = sm.plan(str(tiny), **question)
    assert planned["plan_digest"] == sm.ppl(str(tiny), **question).plan_digest
    assert planned["memory"]["weights"] > 0
    kept = planned["reference"]
    assert kept["states"] == planned["targets"] * kept["head"] // sm.plan(str(tiny), **question)["tokenizer"]["size"]


def test_documents_of_a_corpus_never_see_each_other(tiny: Path, tmp_path: Path) -> None:
    texts = ["The quick brown fox", "the dog does not mind", "x"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    together = sm.ppl(str(tiny), corpus=str(tmp_path / "d.jsonl"))
    alone = [sm.ppl(str(tiny), text=t).scores.logprob for t in texts[:2]]
    assert np.allclose(together.scores.logprob, np.concatenate(alone), rtol=0, atol=rounding.of_checkpoint(tiny))
    assert "1 document too short to have a target" in together.manifest["notes"]


def test_bits_per_byte_and_words_of_a_text_that_is_not_ascii(tiny: Path) -> None:
    text = "naïve 東京 people, 12345 cats"
    run = sm.ppl(str(tiny), text=text)
    unscored = 1  # the first token, one byte of "n"
    assert int(run.facts.byte_len.sum()) == len(text.encode()) - unscored
    assert int(run.facts.word_starts.sum()) == 5 - unscored


TEXT = "Once upon a time there was a naïve 東京 cat. Once upon a time it said: hi.\n\nThe end" * 3


def model_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "table":
        return "table:uniform"
    if kind == "gguf":
        pytest.importorskip("xllamacpp")
        return str(gguf_of(request.getfixturevalue("tiny"), folder / "tiny.gguf"))
    return str(request.getfixturevalue(kind))


@pytest.mark.parametrize("kind", ["table", "tiny", "stories", "gguf"])
def test_equal_ids_have_equal_texts(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    sm.ppl(model_of(kind, request, tmp_path), text=TEXT, context_length=32, out=tmp_path / "run")
    run = sm.load(tmp_path / "run")
    text, top_text = run.facts.text, measured(run.facts.top_text)
    known: dict[int, str] = {}
    for ids, texts in ((run.facts.id, text), (measured(run.scores.top), top_text)):
        for token, word in zip(ids.tolist(), texts.tolist(), strict=True):
            assert known.setdefault(token, word) == word
    assert "" not in known.values()
    assert "�" not in known.values()
    table = run.to_arrow().to_pandas()
    alike = table.text == table.top_text  # raises if the two columns have different categories
    assert alike[table.id == table.top].all()
    assert np.array_equal(alike, text == top_text)


def test_what_the_model_expected_is_never_empty(stories: Path) -> None:
    """▁ alone is a token of this model: a space, where its decoder gives nothing."""
    run = sm.ppl(str(stories), text=TEXT, context_length=64)
    assert " " in measured(run.facts.top_text).tolist() + run.facts.text.tolist()
