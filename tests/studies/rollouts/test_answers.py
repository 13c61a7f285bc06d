"""Answers that are known to be right, scored as a corpus: those of a file of prompts, and those beside rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.models.facts import resolve
from scoremode.core.scores.answers import measured
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
from scoremode.errors import CorpusError
from scoremode.studies.rollouts.prompts import read_answers
from tests.command_line import Command

ROWS = [{"prompt": f"{n} and then ", "answer": "abcdef"[n:]} for n in range(5)] + [{"prompt": "open"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_prompts_are_context_and_answers_are_targets(file: Path) -> None:
    run = sm.ppl("table:uniform", corpus=f"answers:{file}")
    assert bytes(np.asarray(run.facts.id).astype(np.uint8)).decode() == "abcdef" + "bcdef" + "cdef" + "def" + "ef"
    assert run.facts.group.tolist() == [n for n in range(5) for _ in range(6 - n)]
    assert run.perplexity.value == pytest.approx(256)
    assert "1 of 6 prompts have no answer, and are left out" in run.manifest["notes"]
    assert run.manifest["corpus"] == "answers:prompts.jsonl"
    assert len(sm.ppl("table:uniform", corpus=f"answers:{file}", num_samples=2).facts.id) == 11


def test_the_signed_change_has_a_closed_form(command: Command, file: Path) -> None:
    """The successor is sure of every letter but the first of an answer, which it thinks impossible."""
    (row,) = command("compare", "table:uniform", "table:uniform", "--corpus", f"answers:{file}", "--json").json[
        "candidates"
    ]
    assert (row["answer_logprob"], row["targets"]) == (0, 20)
    asked = ("compare", "table:uniform", "table:uniform", "--corpus", f"answers:{file}")
    outcome = command(*asked, "--no-worse-than", "0.01", "--fail-if", "answer_logprob < -0.01 surely")
    assert (outcome.code, "effective prompts are too few" in " ".join(outcome.err.split())) == (1, True)
    file.write_text("".join(json.dumps({"prompt": f"{n} ", "answer": "abc"}) + "\n" for n in range(12)))
    outcome = command(*asked, "--no-worse-than", "0.01", "--fail-if", "answer_logprob < -0.01 surely")
    assert (outcome.code, "equivalent within 0.01" in outcome.out) == (0, True)


def test_a_real_tokenizer_cuts_answers_behind_their_prompts(file: Path, tmp_path: Path) -> None:
    """A word behind a space belongs to one token with it; an answer that would begin inside is cut by itself."""
    rows = [{"prompt": "The capital of France is", "answer": " Paris."}, {"prompt": "The capi", "answer": "tal."}]
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = HuggingFaceTokenizer.load(resolve("smollm2-135m"))
    own_tokens = read_answers(str(path)).as_corpus().own_tokens
    assert own_tokens is not None
    _, tokens = own_tokens(tokenizer, ())
    assert tokenizer.decode(tokens.ids[measured(tokens.target_mask)].tolist()) == " Paris.tal."
    assert [note for note in tokens.notes if "cut into tokens by itself" in note]
    sm.rollouts("table:uniform", path, max_tokens=3, out=tmp_path / "w")
    with pytest.raises(CorpusError, match="is a folder of rollouts"):
        sm.plan("smollm2-135m", corpus=f"answers:{tmp_path / 'w'}")


@pytest.mark.parametrize(
    ("rows", "words"), [([{"prompt": "a"}], "has an answer"), ([{"prompt": "a", "answer": 3}], "not text")]
)
def test_files_without_answers_are_refused(rows: list[object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CorpusError, match=words):
        read_answers(str(path))
    with pytest.raises(CorpusError, match="together with other texts"):
        sm.ppl("table:uniform", corpus=[f"answers:{path}", "python-docs"])
