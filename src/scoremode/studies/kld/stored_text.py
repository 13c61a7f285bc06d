"""Ids that llama.cpp stored ─▶ the text that they stand for, as one document with exactly these tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from scoremode.core.text.corpus import Corpus
from scoremode.core.text.documents import RereadDocuments
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.core.text.tokens import SpelledIds, Tokens, lone_bytes, tokens_of_ids
from scoremode.values import Ids, Ints

ALIKE = 0.99  # share of the tokens that a tokenizer must cut in the same way, not to be doubted


def text_of_ids(ids: Ids, tokenizer: TextTokenizer, name: str) -> tuple[Corpus, RereadDocuments, Tokens]:
    """The text that ids stand for.

    A byte that belongs to no character is shown as �, counts as one byte, and is counted in a note.
    """
    spelled = SpelledIds.of(ids, tokenizer.pieces())
    text, digest, notes = spelled.text, hashlib.sha256(spelled.raw).hexdigest(), tuple(_notes(ids, spelled, tokenizer))
    corpus = Corpus(name, "text", lambda: iter([text]), digest, 1, len(spelled.raw), notes=notes)
    return corpus, RereadDocuments(corpus, "texts", tokenizer), tokens_of_ids([ids], [spelled], tokenizer)


def _notes(ids: Ids, spelled: SpelledIds, tokenizer: TextTokenizer) -> Iterator[str]:
    if spelled.lone:
        yield lone_bytes(spelled.lone)
    visible = np.diff(spelled.ends, prepend=0) > 0
    encoding = tokenizer.encode(spelled.text, special=False)
    alike = np.isin(_places(ids[visible], spelled.ends[visible]), _places(encoding.ids, encoding.char_end))
    if len(alike) and alike.mean() < ALIKE:
        yield (
            f"the candidate's tokenizer cuts only {alike.mean():.1%} of this text into the stored tokens: "
            "is it the tokenizer of the baseline?"
        )


def _places(ids: Ids, ends: Ints) -> Ints:
    """Combines the id of a token and the position of its end into one number."""
    places: Ints = ends.astype(np.int64) << 32 | ids.astype(np.int64)
    return places
