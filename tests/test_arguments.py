"""The Python API refuses values of the wrong type with their name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode import errors
from scoremode.core.text.corpus import load
from scoremode.errors import InputError

# (arguments of sm.plan, words expected)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"text": 5}, "text is 5, which is not a string"),
    ({"text": b"one two"}, "text is a value of the type bytes, which is not a string"),
    ({"text": ["one"]}, "text is a value of the type list, which is not a string"),
    ({"corpus": 5}, "corpus is 5, which is not a string, a path, a list, a Corpus or a CorpusSource; give one"),
    ({"corpus": frozenset()}, "corpus is a value of the type frozenset, which is not a string"),
    ({"corpus": ["python-docs", None]}, "corpus[1] is None, which is not a string or a path"),
    ({"corpus": b"a.txt"}, "corpus is a value of the type bytes, which is not"),
    ({"corpus": []}, "no text was given"),
    ({"corpus": ""}, "--corpus is empty"),
    ({"corpus": "a\0b.txt"}, "cannot be read (embedded null byte)"),
    ({"corpus": "python-docs", "field": 1}, "field is 1, which is not a string"),
    ({"dataset": 1}, "dataset is 1"),
    ({"dataset": ""}, "--dataset is empty"),
    ({"text": "one two", "num_samples": "5"}, "num_samples is '5', which is not a whole number"),
    ({"text": "one two", "num_samples": True}, "num_samples is True, which is not a whole number"),
    ({"text": "one two", "num_samples": 2.0}, "num_samples is 2.0, which is not a whole number"),
    ({"text": "one two", "num_samples": 10**30}, "num_samples is too large"),
    ({"text": "one two", "context_length": "a"}, "context_length is 'a', which is not a whole number"),
    ({"text": "one two", "context_length": float("nan")}, "context_length is nan"),
    ({"text": "one two", "context_length": 10**30}, "context_length is too large"),
    ({"text": "one two", "stride": [1]}, "stride is a value of the type list, which is not a whole number"),
    ({"text": "one two", "max_windows": "all"}, "max_windows is 'all'"),
    ({"text": "one two", "method": 5}, "method is 5, which is not a string"),
    ({"text": "one two", "tokenizer": 5}, "tokenizer is 5, which is not a string or a path"),
    ({"text": "one two", "assistant_only": "yes"}, "assistant_only is 'yes', which is not True or False"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[str(a)[:70] for a, _ in WRONG])
def test_a_value_of_the_wrong_type_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        sm.plan("table:uniform", **arguments)
    assert words in str(caught.value)
    assert caught.value.fix


def test_errors_of_functions_name_arguments_and_not_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "names_flags", False)
    with pytest.raises(InputError, match=r'^no text was given; give one of corpus="NAME-or-FILE", text="TEXT"'):
        sm.plan("table:uniform", corpus=[])
    with pytest.raises(InputError, match=r"^num_samples=0 leaves no text; give 1 or more$"):
        sm.plan("table:uniform", num_samples=0)


def test_without_a_text_the_default_one_is_taken_and_named() -> None:
    planned = sm.plan("table:uniform")
    assert (planned["corpus"], planned["documents"]) == ("python-docs-short", 24)
    note = "the default text: the first 800 characters of 24 documents of python-docs"
    assert planned["notes"] == [note]
    assert sm.plan("table:uniform", num_samples=3)["notes"] == [note.replace("24", "3")]
    assert note in sm.ppl("table:uniform").manifest["notes"]
    with sm.open("table:uniform") as model:
        assert note in model.ppl().manifest["notes"]
    found = sm.compare("table:uniform", "table:uniform")
    assert note in found[0].baseline.manifest["notes"]


@pytest.mark.parametrize("model", [5, None, b"table:uniform", frozenset()])
def test_a_model_that_is_no_name_is_named(model: Any) -> None:
    with pytest.raises(InputError, match=r"model is .*, which is not a string or a path"):
        sm.plan(model, text="one two")


def test_numbers_of_numpy_are_numbers_and_paths_and_loaded_corpora_are_texts(tmp_path: Path) -> None:
    made = sm.plan("table:uniform", text="one two", context_length=np.int64(4), stride=np.int32(2))  # type: ignore[arg-type]
    assert made["method_settings"]["context_length"] == 4
    (tmp_path / "a.txt").write_text("one two")
    corpus = load(tmp_path / "a.txt")
    assert corpus.sha256 == load(text="one two").sha256 == sm.plan("table:uniform", corpus=corpus)["corpus_sha256"]
    assert load([tmp_path / "a.txt", str(tmp_path / "a.txt")]).row_count == 2


@pytest.mark.parametrize("more", [{"text": "other"}, {"num_samples": 1}, {"field": "x"}, {"dataset": "x"}])
def test_nothing_that_a_loaded_corpus_cannot_follow_is_dropped(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="does not apply to a Corpus that is already loaded"):
        sm.plan("table:uniform", corpus=load(text="one two"), **more)


def test_an_error_is_one_line_that_a_terminal_does_not_obey() -> None:
    with pytest.raises(InputError) as caught:
        sm.plan("table:uniform", text="one two", method="\x1b[2J\ngptq\u202e")
    assert str(caught.value).startswith("there is no method '�[2J gptq�'")
