"""A text that is cut into windows gives the tokens of the whole text, whatever the tokenizer and wherever the cuts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.core.text import long_text
from scoremode.core.text.corpus import load
from scoremode.core.text.documents import Document
from scoremode.core.text.long_text import LibraryEncoder, LongTextEncoder, Sizes, window_encoder, windows_of
from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer
from scoremode.core.text.tokens import Tokens, tokenize
from tests.conftest import DATA
from tests.text.tokenizers_at_hand import JOINTS, KINDS, SPECIAL, WORDS, wrapped

TINY = Sizes(step=32, overlap=14, margin=1)
SMALL = Sizes(step=400, overlap=160, margin=40)
TEXT = st.lists(st.sampled_from(WORDS + JOINTS + JOINTS + SPECIAL) | st.text(max_size=3), max_size=80).map("".join)
NAMES = ["bytes", "stories", *KINDS]


@cache
def tokenizer_named(name: str) -> TextTokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "stories":
        return HuggingFaceTokenizer.load(DATA / "stories260K")
    return wrapped(KINDS[name]())


def clean(text: str) -> str:
    return text.encode("utf-8", "ignore").decode()


def assert_same(found: Tokens, tokenizer: TextTokenizer, text: str, *, special: bool) -> None:
    """The tokens and positions that the tokenizer itself gives to the whole text, and what follows from them."""
    whole = tokenizer.encode(text, special=special)
    assert found.ids.tolist() == whole.ids.tolist()
    assert found.char_end.tolist() == whole.char_end.tolist()
    owned = [text[a:b] for a, b in zip(whole.char_start.tolist(), whole.char_end.tolist(), strict=True)]
    assert found.byte_len.tolist() == [len(part.encode()) for part in owned]
    begins = [i for i, c in enumerate(text) if not c.isspace() and (i == 0 or text[i - 1].isspace())]
    counts = [sum(a <= i < b for i in begins) for a, b in zip(whole.char_start, whole.char_end, strict=True)]
    assert found.word_starts.tolist() == counts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("special", [True, False])
@given(text=TEXT.map(clean), read=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_tokens_of_the_whole(name: str, special: bool, text: str, read: int) -> None:
    tokenizer = tokenizer_named(name)
    parts = [text[i : i + read] for i in range(0, len(text), read)]
    found = tokenize([Document(parts)], tokenizer, special=special, sizes=TINY)
    assert_same(found, tokenizer, text, special=special)
    assert found.doc_bytes.tolist() == [len(text.encode())]
    assert found.doc_words.tolist() == [1 + len(re.findall(r"\s+", text))]


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_text_is_cut_into_many_pieces(name: str) -> None:
    """The test above must not pass because nothing is ever cut."""
    tokenizer = tokenizer_named(name)
    text = " ".join(f"{word} {i} and" for i in range(40) for word in WORDS)
    encoder = LongTextEncoder(tokenizer, special=True, sizes=SMALL)
    found = [stretch for stretches in encoder.encode([[text]]) for stretch in stretches]
    assert sum(stretch.text != "" for stretch in found) > len(text) // (SMALL.step * 3)
    assert np.concatenate([s.ids for s in found]).tolist() == tokenizer.encode(text, special=True).ids.tolist()


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
        for sizes in (TINY, SMALL):
            found = tokenize([Document([ODD[odd]])], tokenizer, special=special, sizes=sizes)
            whole = tokenizer.encode(ODD[odd], special=special)
            assert found.ids.tolist() == whole.ids.tolist()
            assert found.char_end.tolist() == whole.char_end.tolist()


def test_what_cannot_be_cut_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "NOTED", 2_000)
    tokenizer = tokenizer_named("gpt4")
    assert tokenize([Document(["two words " * 300])], tokenizer, special=True, sizes=SMALL).notes == ()
    found = tokenize([Document(["\n" * 4_000])], tokenizer, special=True, sizes=SMALL)
    assert found.notes == ("no safe place to cut 4,000 characters of the text: the tokenizer encoded them at once",)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "plain_bpe"])
def test_many_documents_keep_their_own_tokens(name: str) -> None:
    tokenizer = tokenizer_named(name)
    texts = ["", "short", "of small towns " * 100, "x", "the river\n" * 90, ""]
    found = tokenize([Document([text]) for text in texts], tokenizer, special=True, sizes=SMALL)
    edges = found.doc_starts.tolist()
    for number, text in enumerate(texts):
        mine = slice(edges[number], edges[number + 1])
        assert found.ids[mine].tolist() == tokenizer.encode(text, special=True).ids.tolist()
        assert found.char_end[mine].tolist() == tokenizer.encode(text, special=True).char_end.tolist()


@pytest.mark.parametrize("name", ["bytes", "gpt4", "wordpiece"])
def test_joins_and_masks_do_not_depend_on_the_cuts(name: str) -> None:
    text = "of small towns, the river. " * 60
    marks, spans = (27, 270, 271, 1_000, len(text)), ((10, 300), (900, 901))
    given_document = Document([text], source="a b\tc", scored_spans=spans, joined_at=marks)
    one, many = (
        tokenize([given_document], tokenizer_named(name), special=True, sizes=sizes) for sizes in (Sizes(), SMALL)
    )
    for column in ("ids", "char_end", "byte_len", "word_starts", "target_mask", "joined_at", "doc_bytes", "doc_words"):
        assert np.array_equal(getattr(one, column), getattr(many, column)), column
    assert (many.doc_bytes.tolist(), many.doc_words.tolist()) == ([5], [3])


@given(parts=st.lists(st.text("ab", max_size=30), max_size=20), step=st.integers(4, 20))
def test_windows_are_the_text_with_overlaps(parts: list[str], step: int) -> None:
    sizes, text = Sizes(step=step, overlap=step // 2, margin=1), "".join(parts)
    found = list(windows_of(parts, sizes))
    assert found[0].text + "".join(window.text[sizes.overlap :] for window in found[1:]) == text
    assert [window.is_whole for window in found] == [len(found) == 1] * len(found)
    assert [window.is_last for window in found] == [False] * (len(found) - 1) + [True]
    assert all(len(window.text) <= sizes.longest for window in found)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bytes"])
@given(text=TEXT.map(clean))
@settings(max_examples=100, deadline=None)
def test_positions_from_bytes_are_those_of_the_library(name: str, text: str) -> None:
    encoder = LibraryEncoder(tokenizer_named(name))  # type: ignore[arg-type]
    for special in (False, True):
        (quick,), (full,) = (way([text], special=special) for way in (encoder.encode, encoder.encode_with_positions))
        assert quick.ids.tolist() == full.ids.tolist()
        assert quick.ends.tolist() == full.ends.tolist()


@pytest.mark.parametrize(
    ("name", "quick"), [("gpt4", True), ("stories", True), ("plain_bpe", True), ("unigram", False)]
)
def test_ordinary_text_has_positions_from_bytes(name: str, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must not pass because the library is always asked."""
    encoder = LibraryEncoder(tokenizer_named(name))  # type: ignore[arg-type]
    text = "of small towns, the river. 今天天气很好 " * 20
    with monkeypatch.context() as changed:
        changed.setattr(encoder, "encode_with_positions", lambda texts, special: [])
        assert bool(encoder.encode([text], special=False)) is quick


def test_windows_without_a_rare_pair_become_one() -> None:
    """As if all pairs of letters were in tokens: nowhere is known that no token can cross."""
    tokenizer = wrapped(KINDS["gpt4"]())
    tokenizer.vocabulary.never_side_by_side = lambda left, right: False  # type: ignore[method-assign]
    text = "of small towns the river " * 400
    encoder = LongTextEncoder(tokenizer, special=False, sizes=SMALL)
    found = [part for parts in encoder.encode([[text]]) for part in parts if part.text]
    assert [part.text for part in found] == [text]
    assert found[0].ids.tolist() == tokenizer.encode(text, special=False).ids.tolist()


def test_a_class_that_changes_tokens_in_python_is_asked_itself() -> None:
    """Some tokenizers add tokens outside of the library; then the library alone is not used."""
    tokenizer = wrapped(KINDS["gpt2"]())
    assert isinstance(window_encoder(tokenizer, "text"), LibraryEncoder)
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
    assert not isinstance(window_encoder(tokenizer, "text"), LibraryEncoder)
    text = "of small towns " * 3_000
    found = tokenize([Document([text])], tokenizer, special=True, sizes=Sizes(4_000, 1_000, 200))
    wanted = tokenizer.encode(text, special=True).ids.tolist()
    assert found.ids.tolist() == wanted
    assert wanted[0] == 0


def test_real_text_in_windows_of_the_real_size(wikitext_file: Path) -> None:
    text = "".join([wikitext_file.read_text(encoding="utf-8"), *load("python-docs").texts()])
    assert len(text) > 6 * Sizes().step
    for name in ("stories", "gpt4"):
        tokenizer = tokenizer_named(name)
        found = tokenize([Document([text])], tokenizer, special=True)
        whole = tokenizer.encode(text, special=True)
        assert np.array_equal(found.ids, whole.ids)
        assert np.array_equal(found.char_end, whole.char_end)
