"""Documents ─▶ Tokens: one stream of ids, with each token's position in the text, its bytes and its words."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from scoremode.errors import ModelError, OptionError
from scoremode.text.corpus import Message
from scoremode.text.pieces import PieceEncoder, Sizes, Stretch
from scoremode.text.tokenizer import Encoding, TextTokenizer, TokenizerFacts
from scoremode.values import BLOCK, Bools, Ids, Ints, frozen, release_pages

CHARACTERS = 1 << 18  # that are looked at together
SPACES = np.array([chr(point).isspace() for point in range(0x3001)] + [False])
"""Is the character of this code point white space? The last entry stands for all that are larger."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Documents as one stream of ids; document d is ``ids[doc_starts[d]:doc_starts[d + 1]]``.

    The columns of a long text lie on disk, in smaller types of numbers than those named here: convert what you take.
    """

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
    notes: tuple[str, ...] = ()  # what a reader of the result should know

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
        return np.where(self.doc_starts[document] == index, 0, self.char_end[index - 1]).astype(np.int64)

    def release_pages(self) -> None:
        """Drop what was read of columns that lie on disk; it is read again if it is used."""
        for column in (self.ids, self.char_end, self.byte_len, self.word_starts, self.target_mask):
            release_pages(column)

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


class OpenDocument:
    """A document that is read once, in pieces. Its counts are complete after the last piece, as far as not given."""

    def __init__(
        self,
        pieces: Iterable[str],
        *,
        source: tuple[int, int] | None = None,
        scored_spans: tuple[tuple[int, int], ...] | None = None,
        joined_at: Iterable[int] = (),
    ) -> None:
        self._pieces, self._source = pieces, source  # bytes and words of the source, if it is not the text itself
        self._bytes, self._words = 0, WordCounter()
        self.scored_spans = scored_spans
        self.joined_at = array("q", joined_at)  # grows with the pieces

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if self._source is None:
                self._bytes += len(piece) if piece.isascii() else len(piece.encode())
                self._words.add(piece)
            yield piece

    @property
    def source_bytes(self) -> int:
        return self._bytes if self._source is None else self._source[0]

    @property
    def source_words(self) -> int:
        return self._words.count if self._source is None else self._source[1]

    @staticmethod
    def of(document: Document | OpenDocument) -> OpenDocument:
        if isinstance(document, OpenDocument):
            return document
        counts = document.source_bytes, document.source_words
        spans, joined_at = document.scored_spans, document.joined_at
        return OpenDocument([document.text], source=counts, scored_spans=spans, joined_at=joined_at)

    def whole(self) -> Document:
        """The same with its whole text in memory."""
        text = "".join(self)
        return Document(text, self.source_bytes, self.source_words, self.scored_spans, tuple(self.joined_at))


def tokenize(
    documents: Iterable[Document | OpenDocument],
    tokenizer: TextTokenizer,
    *,
    special: bool,
    sink: TokenSink | None = None,
    sizes: Sizes | None = None,
) -> Tokens:
    """All documents as one stream of ids, kept in memory or where ``sink`` keeps them."""
    sink = TokensInMemory() if sink is None else sink
    encoder, opened = PieceEncoder(tokenizer, special=special, sizes=sizes), deque[OpenDocument]()

    def texts() -> Iterator[OpenDocument]:
        for document in documents:
            opened.append(OpenDocument.of(document))
            yield opened[-1]

    doc_ends, doc_bytes, doc_words, joined_at = (array("q") for _ in range(4))
    count = 0
    for stretches in encoder.encode(texts()):
        document = _Tokenized(opened[0], count)
        for stretch in stretches:
            document.keep(stretch, sink)
        opened.popleft()
        count = document.count
        doc_ends.append(count)
        doc_bytes.append(document.opened.source_bytes)
        doc_words.append(document.opened.source_words)
        joined_at.extend(document.joined_at())
    known = KnownAtTheEnd(
        doc_starts=np.concatenate([[0], np.frombuffer(doc_ends, np.int64)]).astype(np.int64),
        doc_bytes=np.array(doc_bytes, np.int64),
        doc_words=np.array(doc_words, np.int64),
        joined_at=np.unique(np.array(joined_at, np.int64)) if joined_at else None,
        tokenizer=tokenizer.facts,
        notes=encoder.notes,
    )
    return sink.finish(known)


class _Tokenized:
    """One document as its tokens arrive."""

    def __init__(self, opened: OpenDocument, count: int) -> None:
        self.opened, self.count = opened, count  # count: tokens of all documents so far
        self._at, self._after_space = 0, True  # characters that are owned; is the last of them white space?
        self._joined, self._resolved = array("q"), 0  # tokens at which texts begin; positions that are tokens already

    def keep(self, stretch: Stretch, sink: TokenSink) -> None:
        if not len(stretch.ids):
            return
        ends = stretch.ends
        owned = stretch.text[: int(ends[-1])]
        sink.add(
            ids=stretch.ids,
            char_end=ends + self._at,
            byte_len=byte_lengths(owned, ends),
            word_starts=word_starts_in(owned, ends, after_space=self._after_space),
            mask=_inside(ends + self._at, self._at, self.opened.scored_spans),
        )
        self._resolve(ends)
        self._at += len(owned)
        self.count += len(stretch.ids)
        self._after_space = owned[-1].isspace() if owned else self._after_space

    def _resolve(self, ends: Ints) -> None:
        """A text begins with the first token that ends after its first character."""
        waiting = np.array(self.opened.joined_at[self._resolved :], np.int64)
        known = waiting[waiting < self._at + int(ends[-1])]
        self._joined.extend((self.count + np.searchsorted(ends, known - self._at, side="right")).tolist())
        self._resolved += len(known)

    def joined_at(self) -> array[int]:
        """The tokens at which texts begin, for a document that was read to its end."""
        self._joined.extend([self.count] * (len(self.opened.joined_at) - self._resolved))
        return self._joined


@dataclass(frozen=True, slots=True, eq=False)
class KnownAtTheEnd:
    """What is known of documents when the last of them is read."""

    doc_starts: Ints
    doc_bytes: Ints
    doc_words: Ints
    joined_at: Ints | None
    tokenizer: TokenizerFacts
    notes: tuple[str, ...]


class TokenSink(Protocol):
    """Where the columns of tokens go while a text is read."""

    def add(self, *, ids: Ids, char_end: Ints, byte_len: Ids, word_starts: Ids, mask: Bools | None) -> None: ...

    def finish(self, known: KnownAtTheEnd) -> Tokens: ...


class TokensInMemory:
    """Columns that are kept in memory."""

    def __init__(self) -> None:
        self._ids, self._ends, self._byte_len, self._word_starts = (list[Any]() for _ in range(4))
        self._masks: list[Bools | None] = []

    def add(self, *, ids: Ids, char_end: Ints, byte_len: Ids, word_starts: Ids, mask: Bools | None) -> None:
        self._ids.append(ids)
        self._ends.append(char_end)
        self._byte_len.append(byte_len)
        self._word_starts.append(word_starts)
        self._masks.append(mask)

    def finish(self, known: KnownAtTheEnd) -> Tokens:
        masks = [mask for mask in self._masks if mask is not None]
        masked = bool(self._masks) and len(masks) == len(self._masks)
        return Tokens(
            ids=frozen(_joined(self._ids, np.int32)),
            doc_starts=frozen(known.doc_starts),
            char_end=frozen(_joined(self._ends, np.int64)),
            byte_len=frozen(_joined(self._byte_len, np.int32)),
            word_starts=frozen(_joined(self._word_starts, np.int32)),
            doc_bytes=frozen(known.doc_bytes),
            doc_words=frozen(known.doc_words),
            tokenizer=known.tokenizer,
            target_mask=frozen(np.concatenate(masks)) if masked else None,
            joined_at=None if known.joined_at is None else frozen(known.joined_at),
            notes=known.notes,
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


def byte_lengths(text: str, ends: Ints) -> Ids:
    """UTF-8 bytes of each token's characters, one block of tokens at a time; a token owns those from the last end."""
    lengths, start = np.empty(len(ends), np.int32), 0
    for begin in range(0, len(lengths), BLOCK):
        here = ends[begin : begin + BLOCK]
        piece = text[start : here[-1]]
        edges = np.concatenate([[0], here - start])
        if not piece.isascii():
            points = np.frombuffer(piece.encode("utf-32-le"), dtype=np.uint32)
            size = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
            edges = np.concatenate([[0], np.cumsum(size, dtype=np.int64)])[edges]
        lengths[begin : begin + BLOCK] = np.diff(edges)
        start = int(here[-1])
    return lengths


def word_starts_of(text: str, encoding: Encoding) -> Ids:
    """How many words begin inside each token."""
    return word_starts_in(text, encoding.char_end)


def word_starts_in(text: str, ends: Ints, *, after_space: bool = True) -> Ids:
    """How many words begin inside each token, one block of words at a time."""
    counts = np.zeros(len(ends) + 1, np.int64)  # the last: words after the last token
    for begin, space, follows in _white_space(text, after_space):
        starts = begin + np.flatnonzero(~space & follows)
        counts += np.bincount(np.searchsorted(ends, starts, side="right"), minlength=len(counts))
    return counts[:-1].astype(np.int32)


def _white_space(text: str, before: bool = True) -> Iterator[tuple[int, Bools, Bools]]:
    """One block of characters at a time: where it begins, which are white space, and which follow white space.

    ``before``: does the text itself begin after white space? White space is what ``\\s`` matches.
    """
    for begin in range(0, len(text), CHARACTERS):
        points = np.frombuffer(text[begin : begin + CHARACTERS].encode("utf-32-le"), np.uint32)
        space: Bools = SPACES[np.minimum(points, len(SPACES) - 1)]
        yield begin, space, np.concatenate([[before], space[:-1]])
        before = bool(space[-1])


def _inside(ends: Ints, start: int, spans: tuple[tuple[int, int], ...] | None) -> Bools | None:
    """Tokens that own at least one character of the spans; the first token owns the characters from ``start``."""
    if spans is None:
        return None
    starts = np.concatenate([[start], ends[:-1]])
    mask = np.zeros(len(ends), dtype=np.bool_)
    for begin, end in spans:
        mask |= (ends > begin) & (starts < end)
    return mask & (ends > starts)


class WordCounter:
    """Words as lm-evaluation-harness counts them: the pieces between white space, including empty ones at the ends."""

    def __init__(self) -> None:
        self.count, self._after_space, self._begun = 1, True, False

    def add(self, text: str) -> None:
        for _, space, after_space in _white_space(text, self._after_space):
            if not self._begun and space[0]:
                self.count += 1  # the text begins with white space, which follows nothing
            self._begun = True
            self.count += int((space & ~after_space).sum())
            self._after_space = bool(space[-1])


def count_words(text: str) -> int:
    """Words of a whole text, see WordCounter."""
    counter = WordCounter()
    counter.add(text)
    return counter.count


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
