"""Ids back to a text: the same tokens, bytes and words as when the text itself is tokenized."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scoremode.core.text.documents import Document
from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from scoremode.core.text.tokens import tokenize
from scoremode.studies.kld.stored_text import text_of_ids

TEXT = "A naïve café — 東京 👩‍🔬 costs 12345 ¥.\n\nThe quick brown fox; and <s> is no token here. " * 3


def test_a_text_of_bytes_comes_back_with_its_columns() -> None:
    tokenizer = ByteTokenizer()
    wanted = tokenize([Document(TEXT)], tokenizer, special=False)
    corpus, (found_document,), found = text_of_ids(wanted.ids.copy(), tokenizer, "stored")
    assert found_document.text == TEXT
    assert corpus.notes == ()
    for name in ("ids", "doc_starts", "char_end", "byte_len", "word_starts", "doc_bytes", "doc_words"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name


def test_a_text_of_a_trained_tokenizer_comes_back(tiny: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    text = TEXT.replace("<s>", "it")
    ids = tokenizer.encode(text, special=False).ids
    corpus, (document,), tokens = text_of_ids(ids.copy(), tokenizer, "stored")
    assert document.text == text
    assert corpus.notes == ()
    assert int(tokens.byte_len.sum()) == len(text.encode()) == corpus.byte_count


def test_special_tokens_have_no_text(tiny_bos: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny_bos)
    ids = tokenizer.encode("The quick brown fox", special=True).ids
    assert ids[0] == tokenizer.facts.bos
    _, (document,), tokens = text_of_ids(ids.copy(), tokenizer, "stored")
    assert document.text == "The quick brown fox"
    assert (int(tokens.byte_len[0]), int(tokens.char_end[0])) == (0, 0)


def test_bytes_that_are_no_character_are_shown_and_counted() -> None:
    ids = np.frombuffer("é".encode()[1:] + "aé".encode() + b"\xff" + "東".encode()[:2], np.uint8).astype(np.int32)
    corpus, (document,), tokens = text_of_ids(ids, ByteTokenizer(), "stored")
    assert document.text == "�aé���"
    assert int(tokens.byte_len.sum()) == len(ids) == corpus.byte_count
    assert tokens.byte_len.tolist() == [1, 1, 2, 0, 1, 1, 1]
    assert "4 bytes of the stored tokens are not UTF-8" in corpus.notes[0]


def test_a_tokenizer_that_cuts_the_text_otherwise_is_doubted(tiny: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    one_by_one = [tokenizer.encode(c, special=False).ids for c in "The quick brown fox jumps over the lazy dog"]
    corpus, (document,), _ = text_of_ids(np.concatenate(one_by_one), tokenizer, "stored")
    assert document.text == "The quick brown fox jumps over the lazy dog"
    assert "is it the tokenizer of the baseline?" in corpus.notes[-1]


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    _, (document,), tokens = text_of_ids(np.array([97, 300, 98], np.int32), ByteTokenizer(), "stored")
    assert document.text == "ab"
    assert tokens.byte_len.tolist() == [1, 0, 1]
