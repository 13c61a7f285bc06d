"""A question is a value: checked when it is made, and the same again from what a reference keeps of it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scoremode.console import flags
from scoremode.core.plan.path import DecodePath
from scoremode.core.plan.question import Question
from scoremode.core.store.run import StoredQuestion
from scoremode.core.text.corpus import Corpus, load
from scoremode.errors import CorpusError, InputError, MethodError, UnknownArgumentError

EVERY: dict[str, Any] = {
    **{"document_tokens": 9, "num_samples": 2, "assistant_only": True, "slice": ["a=<a>..</a>"], "method": "exl3-2025"},
    **{"context_length": 8, "stride": 4, "max_windows": 0, "path": "decode", "sequences": 3, "prefill_tokens": 2},
}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"method": "gptqq"}, MethodError, "did you mean 'gptq'"),
        ({"corpus": "no-such-file.txt"}, CorpusError, "no-such-file.txt"),
        ({"text": "a", "dataset": "org/d"}, CorpusError, "--text and --dataset were given together"),
        ({"text": "a", "split": "train"}, CorpusError, "--split was given without --dataset"),
        ({"sequences": 4}, InputError, "add --path decode"),
        ({"slice": "a"}, InputError, "is not NAME=START..END"),
        ({"context_length": 1}, MethodError, "--context-length 1 leaves no room for a target; give 2 or more"),
        ({"stride": 0}, MethodError, "--stride 0 never advances; give 1 or more"),
        ({"stride": 4, "method": "gptq"}, MethodError, "gptq has no stride to choose; leave --stride out"),
        ({"max_windows": -1}, MethodError, "--max-windows -1 is negative; give 0 for all windows"),
        ({"document_tokens": 0}, InputError, "--document-tokens 0 leaves no text; give 2 or more"),
        ({"contxt_length": 4}, UnknownArgumentError, "did you mean 'context_length'"),
    ],
)
def test_what_cannot_be_asked_is_no_question(arguments: dict[str, Any], error: type[InputError], words: str) -> None:
    with pytest.raises(error, match=words):
        Question.of(arguments)


def test_what_a_reference_keeps_asks_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    question = Question.of({"corpus": [str(tmp_path / "a.txt")], **EVERY})
    stored = question.repeatable()
    assert stored is not None
    assert Question.of(stored) == question
    assert question.decode_path == DecodePath(3, 2)
    msgspec.convert({**stored, "tokenizer": "folder"}, StoredQuestion)
    for other in (Question(corpus="-"), Question(corpus=load(text="in memory"))):
        assert other.repeatable() is None


def test_a_question_without_a_text_is_that_of_a_reference_or_of_the_default_text() -> None:
    assert not Question(method="gptq").names_text
    assert Question(method="gptq").chosen() == {"method": "gptq"}
    assert Question().with_text().names == ["python-docs-short"]
    kept = Question(text="one two")
    assert kept.with_text() is kept


def test_every_field_but_a_corpus_in_memory_has_a_flag(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    parser = argparse.ArgumentParser()
    flags.add_question(parser)
    typed = ["--corpus", str(tmp_path / "a.txt")]
    for name, value in EVERY.items():
        flag = f"--{name.replace('_', '-')}"
        typed += [flag] if value is True else [flag, str(value[0] if isinstance(value, list) else value)]
    parsed = parser.parse_args(typed)
    assert Question.of(flags.question(parsed)) == Question.of({"corpus": str(tmp_path / "a.txt"), **EVERY})
    assert {field.name for field in fields(Question)} == vars(parsed).keys()
    assert isinstance(Question(corpus=load(text="one two")).corpus, Corpus)
