"""Texts that are encoded together are encoded as each alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scoremode.core.text.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    TextTokenizer,
    encode_many,
    ids_with_specials,
)

TEXTS = [
    "The quick brown fox",
    "",
    "é",
    "In 1999, 12345 cats\tsaid:  “déjà-vu”!\n\n東京 2024年 — naïve 👩‍🔬 don't\x07 <s> _x_ ",
    " ",
    "x" * 500,
    "The quick brown fox",
]


def check(tokenizer: TextTokenizer, texts: list[str]) -> None:
    found = encode_many(tokenizer, texts)
    assert found.joined == "".join(texts)
    for i, text in enumerate(texts):
        alone, at, here = tokenizer.encode(text, special=False), found.starts[i], slice(*found.bounds[i : i + 2])
        assert np.array_equal(found.ids[here], alone.ids)
        for name in ("char_start", "char_end", "touches"):
            assert np.array_equal(getattr(found, name)[here] - at, getattr(alone, name)), name
    full = ids_with_specials(tokenizer, texts)
    expected = [tokenizer.encode(text, special=True).ids.tolist() for text in texts]
    plain = [tokenizer.encode(text, special=False).ids.tolist() for text in texts]
    assert (plain if full is None else full) == expected


def test_bytes() -> None:
    check(ByteTokenizer(), TEXTS)
    check(ByteTokenizer(), ["plain", "ASCII", ""])


@pytest.mark.parametrize("name", ["tiny", "tiny_bos"])
def test_a_tokenizer_of_hugging_face(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    check(HuggingFaceTokenizer.load(folder), TEXTS)


def test_any_other_tokenizer_is_asked_text_by_text() -> None:
    class Other:
        def __init__(self) -> None:
            self.inner = ByteTokenizer()
            self.facts = self.inner.facts
            self.encode, self.decode, self.pieces = self.inner.encode, self.inner.decode, self.inner.pieces
            self.render_chat, self.token_text = self.inner.render_chat, self.inner.token_text

    check(Other(), TEXTS)
