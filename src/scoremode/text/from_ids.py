"""Ids that somebody else cut from a text ─▶ the text again, as far as the tokenizer tells it, and Tokens.

The bytes of all tokens are joined first, so that a character that was cut into several tokens is whole again. A byte
that belongs to no character is shown as �, counts as one byte, and is counted in a note.
"""

from __future__ import annotations

import hashlib

import numpy as np

from scoremode.text.corpus import Corpus
from scoremode.text.tokenizer import Encoding, TextTokenizer
from scoremode.text.tokens import Document, Tokens, count_words, word_starts_of
from scoremode.values import Ids, Ints, frozen

OURS = 0.99  # share of the tokens that a tokenizer must cut in the same way, not to be doubted
LONE = (0xDC80, 0xDCFF)  # code points that stand for bytes which are not UTF-8


def text_of_ids(ids: Ids, tokenizer: TextTokenizer, name: str) -> tuple[Corpus, Document, Tokens]:
    """The text that ids stand for: one document, and its tokens with exactly these ids."""
    known = tokenizer.pieces()
    pieces = [known[i] if i < len(known) else b"" for i in ids.tolist()]
    whole = b"".join(pieces)
    points = np.frombuffer(whole.decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass"), np.uint32)
    lone = (points >= LONE[0]) & (points <= LONE[1])
    text = np.where(lone, ord("�"), points).astype(np.uint32).tobytes().decode("utf-32-le")
    sizes = np.where(lone, 1, 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF))
    begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # of each character, in bytes
    ends = np.searchsorted(begins[:-1], np.cumsum([len(piece) for piece in pieces], dtype=np.int64), side="left")
    starts = np.concatenate([[0], ends[:-1]])
    encoding = Encoding(ids, starts, ends, starts)
    notes = tuple(_notes(text, encoding, tokenizer, int(lone.sum())))
    corpus = Corpus(name, "text", lambda: iter([text]), hashlib.sha256(whole).hexdigest(), 1, len(whole), notes=notes)
    words = count_words(text)
    tokens = Tokens(
        ids=frozen(ids),
        doc_starts=frozen(np.array([0, len(ids)], np.int64)),
        char_end=frozen(ends),
        byte_len=frozen((begins[ends] - begins[starts]).astype(np.int32)),
        word_starts=frozen(word_starts_of(text, encoding)),
        doc_bytes=frozen(np.array([len(whole)], np.int64)),
        doc_words=frozen(np.array([words], np.int64)),
        tokenizer=tokenizer.facts,
    )
    return corpus, Document(text, len(whole), words), tokens


def _notes(text: str, encoding: Encoding, tokenizer: TextTokenizer, lone: int) -> list[str]:
    found = []
    if lone:
        found.append(f"{lone:,} byte{'s' if lone > 1 else ''} of the stored tokens are not UTF-8, and are shown as �")
    share = _cut_alike(text, encoding, tokenizer)
    if share < OURS:
        found.append(
            f"the candidate's tokenizer cuts only {share:.1%} of this text into the stored tokens: "
            "is it the tokenizer of the baseline?"
        )
    return found


def _cut_alike(text: str, stored: Encoding, tokenizer: TextTokenizer) -> float:
    """The share of stored tokens with characters that the tokenizer itself cuts from the text."""
    visible = stored.char_end > stored.char_start
    if not visible.any():
        return 1.0
    own = tokenizer.encode(text, special=False)
    both = np.intersect1d(_places(stored.ids[visible], stored.char_end[visible]), _places(own.ids, own.char_end))
    return len(both) / int(visible.sum())


def _places(ids: Ids, ends: Ints) -> Ints:
    """One number for a token and where it ends."""
    found: Ints = ends.astype(np.int64) << 32 | ids.astype(np.int64)
    return found
