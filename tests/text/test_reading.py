"""Places of documents, judged by slices of the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.text.reading import Excerpts, ReadAgain
from scoremode.text.tokens import Document, OpenDocument

TEXTS = ["plain text", "", "naïve Füße, 日本語 und 😀 mixed", "ends\n", "𝔘𝔫𝔦"]


def documents() -> list[Document]:
    return [Document(text, len(text.encode()), 1) for text in TEXTS]


def again() -> ReadAgain:
    """The same documents, read in pieces of two characters."""
    return ReadAgain(lambda: (OpenDocument([t[i : i + 2] for i in range(0, len(t), 2)]) for t in TEXTS), len(TEXTS))


def placed(draw: st.DataObject) -> tuple[list[int], list[int], list[int]]:
    places = []
    for document in sorted(draw.draw(st.lists(st.sampled_from(range(len(TEXTS))), max_size=12))):
        start = draw.draw(st.integers(0, len(TEXTS[document])))
        places.append((document, start, draw.draw(st.integers(start, len(TEXTS[document])))))
    return tuple(map(list, zip(*places, strict=True))) if places else ([], [], [])  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["kept", "read again"])
@given(draw=st.data())
def test_places_are_slices_of_the_text(kind: str, draw: st.DataObject) -> None:
    document, start, end = (np.array(column, np.int64) for column in placed(draw))
    excerpts = Excerpts(documents() if kind == "kept" else again())
    wanted = [TEXTS[d][a:b] for d, a, b in zip(document.tolist(), start.tolist(), end.tolist(), strict=True)]
    assert excerpts.at(document, start, end) == wanted
