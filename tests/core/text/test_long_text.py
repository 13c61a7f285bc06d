"""A text that is cut into parts gives the tokens of the whole text, whatever the tokenizer and wherever the cuts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.core.text import long_text
from scoremode.core.text.corpus import load
from scoremode.core.text.documents import Document, arranged
from scoremode.core.text.long_text import encode_texts
from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer
from scoremode.core.text.tokens import Tokens, tokenize
from scoremode.errors import CorpusError
from tests.conftest import DATA
from tests.core.text.tokenizers_at_hand import JOINTS, KINDS, SPECIAL, WORDS, wrapped

TINY: dict[str, Any] = {"PART": 80, "TOGETHER": 160, "REACH": 130, "AROUND": 60}
SMALL: dict[str, Any] = {"PART": 400, "TOGETHER": 1200, "REACH": 300, "AROUND": 100}
TEXT = st.lists(st.sampled_from(WORDS + JOINTS + JOINTS + SPECIAL) | st.text(max_size=3), max_size=80).map("".join)
NAMES = ["bytes", "stories", *KINDS]


@cache
def tokenizer_named(name: str) -> TextTokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "stories":
        return HuggingFaceTokenizer.load(DATA / "stories260K")
    return wrapped(KINDS[name]())


def tokenized(documents: list[Document], tokenizer: TextTokenizer, sizes: dict[str, Any], *, special: bool) -> Tokens:
    with patch.multiple(long_text, **sizes):
        return tokenize(documents, tokenizer, special=special)


def clean(text: str) -> str:
    return text.encode("utf-8", "ignore").decode()


def assert_same(found: Tokens, tokenizer: TextTokenizer, text: str, *, special: bool) -> None:
    """The tokens and positions that the tokenizer itself gives to the whole text, and what follows from them."""
    whole = tokenizer.encode(text, special=special)
    assert found.ids.tolist() == whole.ids.tolist()
    assert found.char_end.tolist() == whole.char_end.tolist()
    owned = [text[a:b] for a, b in zip(whole.char_start.tolist(), whole.char_end.tolist(), strict=True)]
    assert found.byte_len.tolist() == [len(part.encode()) for part in owned]
    begins = [not c.isspace() and (i == 0 or text[i - 1].isspace()) for i, c in enumerate(text)]
    counts = [sum(begins[a:b]) for a, b in zip(whole.char_start.tolist(), whole.char_end.tolist(), strict=True)]
    assert found.word_starts.tolist() == counts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("special", [True, False])
@given(text=TEXT.map(clean))
@settings(max_examples=60, deadline=None)
def test_parts_give_the_tokens_of_the_whole(name: str, special: bool, text: str) -> None:
    tokenizer = tokenizer_named(name)
    found = tokenized([Document(text)], tokenizer, TINY, special=special)
    assert_same(found, tokenizer, text, special=special)
    assert found.doc_bytes.tolist() == [len(text.encode())]
    assert found.doc_words.tolist() == [1 + len(re.findall(r"\s+", text))]


@pytest.mark.parametrize(
    ("name", "cut"),
    [("bytes", True), ("gpt4", True), ("wordpiece", True), ("unigram", True), ("stories", False), ("plain_bpe", False)],
)
def test_ordinary_text_is_cut_into_parts_where_that_is_exact(name: str, cut: bool) -> None:
    """The test above must not pass because nothing is ever cut."""
    tokenizer = tokenizer_named(name)
    text = " ".join(f"{word} {i} and" for i in range(40) for word in WORDS)
    with patch.multiple(long_text, **SMALL):
        parts = len(long_text._Cutter(tokenizer, special=True)._places(text)) - 1
        ((ids, _),) = encode_texts([text], tokenizer, special=True)
    assert (parts > len(text) // 1_000) is cut
    assert ids.tolist() == tokenizer.encode(text, special=True).ids.tolist()


ODD = {
    "empty": "",
    "one token": "a",
    "one long word": "x" * 3_000,
    "words without spaces": "abcdefghij" * 300,
    "only spaces": " " * 3_000,
    "only newlines": "\n" * 3_000,
    "carriage returns": "one\r\ntwo\r\n\r\n" * 200,
    "combining marks": "e" + "\u0301" * 3_000,
    "joiners": "👩\u200d👩\u200d👧\u200d👦" * 300,
    "special tokens": "<s>one</s>two <extra> three" * 120,
    "one kind of digit": "7" * 3_000,
    "a newline far away": "a\n" + " " * 1_500 + "\nb" * 300,
    "accents apart": "e\u0301 a\u0308 " * 400,
    "no spaces at all": "今天天气很好日本語の文章です" * 200,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", ODD)
def test_odd_texts_are_cut_right_or_not_at_all(name: str, odd: str) -> None:
    tokenizer = tokenizer_named(name)
    for special in (False, True):
        whole = tokenizer.encode(ODD[odd], special=special)
        for sizes in (TINY, SMALL):
            found = tokenized([Document(ODD[odd])], tokenizer, sizes, special=special)
            assert found.ids.tolist() == whole.ids.tolist()
            assert found.char_end.tolist() == whole.char_end.tolist()


def test_the_memory_for_a_text_that_is_encoded_at_once_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scoremode.core.text.tokenizer.LARGE_TEXT", 400_000)
    for text in ("two words " * 50_000, "\n" * 500_000):
        tokenize([Document(text)], tokenizer_named("gpt4"), special=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scoremode: a text of 0 MB is split into tokens at once, which needs about ")


def test_a_class_that_changes_tokens_in_python_is_asked_itself() -> None:
    """Some tokenizers add tokens outside of the library."""
    tokenizer = wrapped(KINDS["gpt4"]())
    call = tokenizer.hf.__class__.__call__

    class Doubling(type(tokenizer.hf)):  # type: ignore[misc]
        def __call__(self, *given: Any, **named: Any) -> Any:
            found = call(self, *given, **named)
            if named.get("add_special_tokens"):
                found["input_ids"] = [[0, *ids] for ids in found["input_ids"]]
                if "offset_mapping" in found:
                    found["offset_mapping"] = [[(0, 0), *offsets] for offsets in found["offset_mapping"]]
            return found

    tokenizer.hf.__class__ = Doubling
    text = "of small towns " * 3_000
    found = tokenized([Document(text)], tokenizer, SMALL, special=True)
    wanted = tokenizer.encode(text, special=True).ids.tolist()
    assert found.ids.tolist() == wanted
    assert wanted[0] == 0


def test_real_text_in_parts_of_the_real_size(wikitext_file: Path) -> None:
    text = "".join([wikitext_file.read_text(encoding="utf-8"), *load("python-docs").texts()])
    assert len(text) > 6 * long_text.PART
    for name in ("stories", "gpt4"):
        tokenizer = tokenizer_named(name)
        found = tokenize([Document(text)], tokenizer, special=True)
        whole = tokenizer.encode(text, special=True)
        assert np.array_equal(found.ids, whole.ids)
        assert np.array_equal(found.char_end, whole.char_end)


def test_tokens_and_joined_rows_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of many bytes becomes as many tokens of ``table:uniform``."""
    monkeypatch.setattr("scoremode.core.free_memory.available", lambda: 20 << 20)
    with pytest.raises(CorpusError, match="cutting a text of 1 MB into tokens needs about 48 MB of memory, and 21 MB"):
        next(encode_texts(["x" * 1_000_000], ByteTokenizer(), special=False))
    corpus = load(text="abc" * 1_000_000)
    monkeypatch.setattr("scoremode.core.free_memory.available", lambda: 8)
    with pytest.raises(CorpusError, match="joining text needs about 9 MB of memory, and 0 MB are free"):
        next(arranged(corpus, "join-rows"))
