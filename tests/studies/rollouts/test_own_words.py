"""Comparisons and mismatch on rollouts, from the command line: a table against itself has closed forms."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.engines.table.engine import TableEngine
from scoremode.studies.rollouts.readings import other_choices
from tests.command_line import Command

PROMPTS = [f"prompt {n}" for n in range(6)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Texts that a uniform table wrote: greedy ones, and ones that were drawn."""
    found = {}
    for name, temperature, samples in (("greedy", 0.0, 1), ("drawn", 1.0, 2)):
        found[name] = tmp_path_factory.mktemp(name) / "texts"
        how = {"temperature": temperature, "samples": samples, "max_tokens": 20}
        sm.rollouts("table:uniform", PROMPTS, out=found[name], seed=1, **how)  # type: ignore[arg-type]
    return found


def test_a_model_does_not_part_from_itself(command: Command, written: dict[str, Path]) -> None:
    asked = ("compare", "table:uniform", "table:uniform", "--corpus", f"rollouts:{written['greedy']}")
    assert "without a parting" in command(*asked).out
    (row,) = command(*asked, "--json").json["candidates"]
    found = row["own_words"]
    assert list(found) == ["writer", "reader", "partings", "examples"]
    assert found["examples"] == []
    assert (found["partings"]["without_other_choice"], found["partings"]["other_choices"]) == (1, 0)


def test_a_model_reads_its_own_texts(command: Command, written: dict[str, Path]) -> None:
    corpus = ("--corpus", f"rollouts:{written['drawn']}")
    (row,) = command("compare", "table:uniform", "table:uniform", *corpus, "--json").json["candidates"]
    found = row["own_words"]
    assert (found["own_texts"]["log_ratio"], found["own_texts"]["ppl_ratio"], found["own_texts"]["groups"]) == (0, 1, 6)


def test_texts_of_the_candidate_are_read_by_the_baseline(command: Command, written: dict[str, Path]) -> None:
    """Its own texts, read by itself, would say nothing: the same numbers as with the models swapped."""
    asked = ("--corpus", f"rollouts:{written['drawn']}", "--json")
    (own,) = command("compare", "table:successor", "table:uniform", *asked).json["candidates"]
    (swapped,) = command("compare", "table:uniform", "table:successor", *asked).json["candidates"]
    assert own["own_words"] == swapped["own_words"]
    assert (own["own_words"]["writer"], own["own_words"]["reader"]) == ("table:uniform", "table:successor")


def test_what_was_written_and_what_the_reader_prefers(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terminal, page and JSON show the same example of each of three texts; tokens are quoted and escaped."""
    monkeypatch.setenv("COLUMNS", "200")
    sm.rollouts("table:uniform", PROMPTS, max_tokens=2, out=tmp_path / "written")  # greedy: ids 0, of equal ones
    asked = ("compare", "table:uniform", "table:successor", "--corpus", f"rollouts:{tmp_path / 'written'}")
    (row,) = command(*asked, "--json").json["candidates"]
    examples = row["own_words"]["examples"]
    assert [one["prompt"] for one in examples] == [0, 1, 2]
    uniform, never = pytest.approx(1 / 256), {"p_reader": 0.0, "p_prefers": 1.0, "gap": None}
    assert examples[0] == {
        **{"prompt": 0, "sample": 0, "token": 1, "before": "prompt 0", "written": "\0", "prefers": "1"},
        **{"p_writer": uniform, **never},
    }
    said = command(*asked, "--report", tmp_path / "page.html").out
    assert "where table:successor would most clearly have written something else\nafter “prompt 0”" in said
    sentence = r"table:uniform wrote '\x00' (0.4%); table:successor prefers '1' (100.0%) and gives '\x00' 0.0%"
    assert sentence in said
    assert sentence in html.unescape((tmp_path / "page.html").read_text())


def test_the_most_surprising_token_of_each_text_is_chosen() -> None:
    """The reader is a table of drawn logits, so every probability can be written out."""
    ends = "abcdef"  # of the prompts; what is written greedily are zeros
    written = sm.rollouts("table:uniform", [f"x{end}" for end in ends], max_tokens=3)
    logits = np.random.default_rng(5).normal(0.0, 2.0, (256, 256))
    logits[0, 0] = 9.0  # after a zero, the reader writes zeros too
    logprob = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = other_choices(sm.ppl("table:uniform", engine=TableEngine(logits), corpus=written), written)
    wanted = sorted(ends, key=lambda end: logprob[ord(end), 0])[:3]
    assert [(one.before, one.token) for one in found] == [(f"x{end}", 1) for end in wanted]
    for one, end in zip(found, wanted, strict=True):
        row = logprob[ord(end)]
        assert one.gap == pytest.approx(row.max() - row[0])
        assert (one.p_reader, one.p_prefers) == pytest.approx((np.exp(row[0]), np.exp(row.max())))
        assert one.p_writer == pytest.approx(1 / 256)
    assert other_choices(sm.ppl("table:uniform", engine=TableEngine(logits), corpus=written), written, noise=99.0) == ()


def test_a_trainer_against_rollouts(command: Command, written: dict[str, Path], tmp_path: Path) -> None:
    asked = ("compare", f"rollouts:{written['drawn']}", "table:uniform")
    found = command(*asked, "--json").json
    assert abs(found["k3"]) < 1e-12
    assert found["samples"] == 12
    outcome = command(*asked, "--fail-if", "k3 > 0.01", "--report", tmp_path / "page.html")
    assert outcome.code == 0
    assert (tmp_path / "page.html").exists()
    outcome = command(*asked, "--fail-if", "tokens > 1")
    assert (outcome.code, "tokens is" in outcome.err) == (1, True)
    run = sm.ppl("table:uniform", corpus=f"rollouts:{written['drawn']}", out=tmp_path / "run")
    assert command("compare", asked[1], tmp_path / "run", "--json").json["k3"] == found["k3"]
    with pytest.raises(sm.ScoremodeError, match=r"is a text, not a model; use sm.mismatch\(DIR, MODEL\)"):
        sm.compare(asked[1], "table:uniform")
    assert sm.mismatch(written["drawn"], run).statistics()["tokens"] == found["tokens"]
