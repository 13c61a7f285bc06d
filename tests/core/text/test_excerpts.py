"""Excerpts of documents that are read again, judged by slices of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core.text.corpus import Corpus
from scoremode.core.text.documents import RereadDocuments
from scoremode.core.text.files import PlainText
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.errors import CorpusError

TEXTS = ["plain text", "", "naïve Füße, 日本語 und 😀 mixed", "ends\n", "𝔘𝔫𝔦"]


def in_pieces(text: str) -> Corpus:
    """A text that is read two characters at a time."""
    pieces = PlainText(lambda: iter([text[i : i + 2] for i in range(0, len(text), 2)] or [""]))
    return Corpus("made", "text", pieces, "0" * 64, 1, len(text.encode()))


def documents() -> RereadDocuments:
    parts = tuple(map(in_pieces, TEXTS))
    return RereadDocuments(
        Corpus("made", "documents", lambda: iter(TEXTS), "0" * 64, len(TEXTS), 1, parts), "texts", ByteTokenizer()
    )


@given(draw=st.data())
def test_excerpts_are_slices_of_the_text(draw: st.DataObject) -> None:
    found = documents()
    assert [document.read() for document in found] == TEXTS
    for number in draw.draw(st.lists(st.sampled_from(range(len(TEXTS))), max_size=12)):
        start = draw.draw(st.integers(0, len(TEXTS[number])))
        end = draw.draw(st.integers(start, len(TEXTS[number])))
        assert found.excerpt(number, start, end) == TEXTS[number][start:end]


@pytest.mark.parametrize(("number", "end"), [(0, 11), (5, 1)])
def test_a_text_that_became_shorter_is_refused(number: int, end: int) -> None:
    with pytest.raises(CorpusError, match="shorter than when it was read first"):
        documents().excerpt(number, 0, end)
