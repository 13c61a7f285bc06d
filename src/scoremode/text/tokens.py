"""Documents ─▶ Tokens: one stream of ids, with each token's position in the text, its bytes and its words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scoremode.errors import ModelError, OptionError
from scoremode.text.corpus import Message
from scoremode.text.tokenizer import Encoding, TextTokenizer, TokenizerFacts
from scoremode.values import BLOCK, Bools, Ids, Ints, frozen

CHARACTERS = 1 << 18  # that are looked at together
SPACES = np.array([chr(point).isspace() for point in range(0x3001)] + [False])
"""Is the character of this code point white space? The last entry stands for all that are larger."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Documents as one stream of ids; document d is ``ids[doc_starts[d]:doc_starts[d + 1]]``."""

    ids: Ids  # (n,)
    doc_starts: Ints  # (documents + 1,)
    char_end: Ints  # (n,) in the document's text: a token owns all characters from the end of the one before to here
    byte_len: Ids  # (n,) UTF-8 bytes of the document that this token completes; sums to the document's bytes
    word_starts: Ids  # (n,) words (runs of non-space) that begin inside this token
    doc_bytes: Ints  # (documents,) of the source text, before a recipe changes it
    doc_words: Ints  # (documents,) of the source text, as lm-evaluation-harness counts them
    tokenizer: TokenizerFacts
    target_mask: Bools | None = None  # (n,) tokens that may be targets; None: all
    joined_at: Ints | None = None  # tokens where another text begins inside a joined document; None: nowhere

    @property
    def documents(self) -> int:
        return len(self.doc_starts) - 1

    @property
    def char_start(self) -> Ints:
        """Where each token's characters begin in the document's text, (n,); special tokens are empty spans."""
        return self.char_start_of(np.arange(len(self)))

    def char_start_of(self, index: Ints) -> Ints:
        """As ``char_start``, for some tokens: the end of the token before, 0 for the first token of a document."""
        document = np.searchsorted(self.doc_starts, index, side="right") - 1
        return np.where(self.doc_starts[document] == index, 0, self.char_end[index - 1])

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Document:
    """A text as a recipe feeds it, with the counts of its source."""

    text: str
    source_bytes: int
    source_words: int
    scored_spans: tuple[tuple[int, int], ...] | None = None  # characters that may be targets; None: all
    joined_at: tuple[int, ...] = ()  # characters at which another text begins, if a recipe joined several


def tokenize(documents: Iterable[Document], tokenizer: TextTokenizer, *, special: bool) -> Tokens:
    """All documents as one stream of ids."""
    ids, ends, byte_len, word_starts, masks = [], [], [], [], []
    doc_bytes, doc_words = [], []
    joined_at: list[Ints] = []
    for document in documents:
        encoding = tokenizer.encode(document.text, special=special)
        ids.append(encoding.ids)
        ends.append(encoding.char_end)
        byte_len.append(_byte_lengths(document.text, encoding))
        word_starts.append(word_starts_of(document.text, encoding))
        masks.append(_inside(encoding, document.scored_spans))
        doc_bytes.append(document.source_bytes)
        doc_words.append(document.source_words)
        # a text begins with the first token that ends after its first character
        inside = np.searchsorted(encoding.char_end, np.array(document.joined_at, np.int64), side="right")
        joined_at.append(sum(map(len, ids[:-1])) + inside)
        del encoding  # else its memory would stay in use while the next document is encoded
    lengths = [len(part) for part in ids]
    return Tokens(
        ids=frozen(_joined(ids, np.int32)),
        doc_starts=frozen(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)),
        char_end=frozen(_joined(ends, np.int64)),
        byte_len=frozen(_joined(byte_len, np.int32)),
        word_starts=frozen(_joined(word_starts, np.int32)),
        doc_bytes=frozen(np.array(doc_bytes, dtype=np.int64)),
        doc_words=frozen(np.array(doc_words, dtype=np.int64)),
        tokenizer=tokenizer.facts,
        target_mask=frozen(np.concatenate([m for m in masks if m is not None]))
        if masks and all(m is not None for m in masks)
        else None,
        joined_at=frozen(np.unique(np.concatenate(joined_at)).astype(np.int64)) if any(map(len, joined_at)) else None,
    )


def first_tokens(tokens: Tokens, limit: int) -> tuple[Tokens, int]:
    """The first ``limit`` tokens of each document, and how many documents were shortened.

    Many short documents give smaller errors than a few long ones for the same work.
    """
    if tokens.joined_at is not None:
        raise OptionError("--document-tokens: the method joins all texts into one document", fix="use sliding-once")
    if limit < 1:
        raise OptionError(f"--document-tokens {limit} leaves no text", fix="give 2 or more")
    lengths = np.diff(tokens.doc_starts)
    kept = np.minimum(lengths, limit)
    inside = np.arange(len(tokens)) - np.repeat(tokens.doc_starts[:-1], lengths) < limit
    document = np.repeat(np.arange(len(lengths)), kept)
    cut = replace(
        tokens,
        ids=frozen(tokens.ids[inside]),
        doc_starts=frozen(np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)),
        char_end=frozen(tokens.char_end[inside]),
        byte_len=frozen(tokens.byte_len[inside]),
        word_starts=frozen(tokens.word_starts[inside]),
        doc_bytes=frozen(_of_kept(document, tokens.byte_len[inside], kept < lengths, tokens.doc_bytes)),
        doc_words=frozen(_of_kept(document, tokens.word_starts[inside], kept < lengths, tokens.doc_words)),
        target_mask=None if tokens.target_mask is None else frozen(tokens.target_mask[inside]),
    )
    return cut, int((kept < lengths).sum())


def _of_kept(document: Ints, of_token: Ids, was_cut: Bools, of_document: Ints) -> Ints:
    """A count per document: of its kept tokens if it was shortened, else of the whole document."""
    counted = np.bincount(document, of_token, minlength=len(of_document)).astype(np.int64)
    return np.where(was_cut, counted, of_document)


def _joined(parts: list[Any], dtype: type[np.generic]) -> Any:
    """All parts in one array. Empties the list, so that only one column is in memory twice at a time."""
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, dtype)
    parts.clear()
    return joined.astype(dtype, copy=False)


def _byte_lengths(text: str, encoding: Encoding) -> Ids:
    """UTF-8 bytes of each token's characters, one block of tokens at a time."""
    lengths = np.empty(len(encoding.ids), np.int32)
    for begin in range(0, len(lengths), BLOCK):
        starts, ends = encoding.char_start[begin : begin + BLOCK], encoding.char_end[begin : begin + BLOCK]
        piece = text[starts[0] : ends[-1]]
        if piece.isascii():
            lengths[begin : begin + BLOCK] = ends - starts
            continue
        points = np.frombuffer(piece.encode("utf-32-le"), dtype=np.uint32)
        size = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
        before = np.concatenate([[0], np.cumsum(size, dtype=np.int64)])
        lengths[begin : begin + BLOCK] = before[ends - starts[0]] - before[starts - starts[0]]
    return lengths


def word_starts_of(text: str, encoding: Encoding) -> Ids:
    """How many words begin inside each token, one block of words at a time."""
    counts = np.zeros(len(encoding.ids), np.int32)
    for begin, space, after_space in _white_space(text):
        starts = begin + np.flatnonzero(~space & after_space)
        owner = np.searchsorted(encoding.char_end, starts, side="right")
        np.add.at(counts, owner[owner < len(counts)], 1)
    return counts


def _white_space(text: str) -> Iterator[tuple[int, Bools, Bools]]:
    """One block of characters at a time: where it begins, which are white space, and which follow white space.

    The text begins after white space. White space is what ``\\s`` matches.
    """
    before = True
    for begin in range(0, len(text), CHARACTERS):
        points = np.frombuffer(text[begin : begin + CHARACTERS].encode("utf-32-le"), np.uint32)
        space: Bools = SPACES[np.minimum(points, len(SPACES) - 1)]
        yield begin, space, np.concatenate([[before], space[:-1]])
        before = bool(space[-1])


def _inside(encoding: Encoding, spans: tuple[tuple[int, int], ...] | None) -> Bools | None:
    """Tokens that own at least one character of the spans."""
    if spans is None:
        return None
    mask = np.zeros(len(encoding.ids), dtype=np.bool_)
    for begin, end in spans:
        mask |= (encoding.char_end > begin) & (encoding.char_start < end)
    return mask & (encoding.char_end > encoding.char_start)


def count_words(text: str) -> int:
    """Words as lm-evaluation-harness counts them: the pieces between white space, including empty ones at the ends."""
    found = 0
    for begin, space, after_space in _white_space(text):
        if begin == 0 and space[0]:
            found += 1  # the text begins with white space, which follows nothing
        found += int((space & ~after_space).sum())
    return 1 + found


def chat_document(messages: list[Message], tokenizer: TextTokenizer, *, assistant_only: bool) -> Document:
    """A conversation as the model's chat template writes it; the template's text already contains special tokens.

    The assistant's part of a turn is everything that the template writes after it opens the turn: the assistant's words
    and the end-of-turn mark.
    """
    text = tokenizer.render_chat(messages, open_turn=False)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if not assistant_only or message["role"] != "assistant":
            continue
        opened = tokenizer.render_chat(messages[:index], open_turn=True)
        closed = tokenizer.render_chat(messages[: index + 1], open_turn=False).rstrip()
        if not (text.startswith(opened) and text.startswith(closed) and len(closed) > len(opened)):
            raise ModelError(
                "the chat template rewrites earlier turns, so the assistant's tokens cannot be identified",
                fix="score all tokens, without --assistant-only",
            )
        spans.append((len(opened), len(closed)))
    if assistant_only and not spans:
        raise ModelError("a chat row has no assistant turn", fix="remove the row, or score without --assistant-only")
    size = len(text.encode())
    return Document(text, size, count_words(text), tuple(spans) if assistant_only else None)
