"""Documents ─▶ Tokens: one stream of ids, with each token's position in the text, its bytes and its words.

Ids that another program stored become Tokens as well, and a text again, as far as the ids tell it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.core.text.documents import Document, count_words
from scoremode.core.text.long_text import encode_texts
from scoremode.core.text.slices import Slicing
from scoremode.core.text.tokenizer import TextTokenizer, TokenizerFacts
from scoremode.errors import OptionError
from scoremode.values import Bools, Ids, Ints, frozen

COLUMNS = {"ids": "i4", "char_end": "i8", "byte_len": "i4", "word_starts": "i4", "target_mask": "?", "slices": "i4"}
BLOCK = 1 << 14  # tokens whose bytes are counted together
LONE = (0xDC80, 0xDCFF)  # code points that stand for bytes which are not UTF-8


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
    slices: Ids | None = None  # (n,) the slice that each token begins in, as an index of ``slice_names``
    slice_names: tuple[str, ...] = ()
    doc_group: Ints | None = None  # (documents,) documents with equal numbers are not independent; None: all are
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

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Tokens({len(self):,} of {self.documents:,} documents, tokenizer {self.tokenizer.fingerprint[:12]})"


def tokenize(documents: Iterable[Document], tokenizer: TextTokenizer, *, special: bool) -> Tokens:
    """All tokens of the documents."""
    reading = deque[Document]()

    def texts() -> Iterator[str]:
        for document in documents:
            reading.append(document)  # several are read before the first is encoded
            yield document.text

    columns: dict[str, list[npt.NDArray[Any]]] = {name: [np.zeros(0, kind)] for name, kind in COLUMNS.items()}
    doc_starts, doc_bytes, doc_words, joined_at = [0], list[int](), list[int](), list[npt.NDArray[Any]]()
    slicing: Slicing | None = None
    for ids, ends in encode_texts(texts(), tokenizer, special=special):
        document = reading.popleft()
        starts = np.concatenate([[0], ends[:-1]])[: len(ends)]
        columns["ids"].append(ids)
        columns["char_end"].append(ends)
        columns["byte_len"].append(byte_lengths(document.text, ends))
        columns["word_starts"].append(word_starts_in(document.text, ends))
        if document.scored_spans is not None:
            columns["target_mask"].append(_inside(starts, ends, document.scored_spans))
        if document.slices is not None:
            columns["slices"].append(document.slices.label(starts, ends))
            slicing = document.slices.slicing
        # a text begins at the first token that ends after its first character
        joined_at.append(doc_starts[-1] + np.searchsorted(ends, document.joined_at, side="right"))
        doc_starts.append(doc_starts[-1] + len(ids))
        doc_bytes.append(document.source_bytes)
        doc_words.append(document.source_words)
    made = {name: frozen(np.concatenate(columns.pop(name), dtype=kind)) for name, kind in COLUMNS.items()}
    joined = np.unique(np.concatenate([np.zeros(0, np.int64), *joined_at]).astype(np.int64))
    return Tokens(
        ids=made["ids"],
        doc_starts=frozen(np.array(doc_starts, np.int64)),
        char_end=made["char_end"],
        byte_len=made["byte_len"],
        word_starts=made["word_starts"],
        doc_bytes=frozen(np.array(doc_bytes, np.int64)),
        doc_words=frozen(np.array(doc_words, np.int64)),
        tokenizer=tokenizer.facts,
        target_mask=made["target_mask"] if len(made["target_mask"]) else None,
        joined_at=frozen(joined) if len(joined) else None,
        slices=made["slices"] if slicing else None,
        slice_names=slicing.names if slicing else (),
        notes=slicing.finish() if slicing else (),
    )


def first_tokens(tokens: Tokens, limit: int) -> tuple[Tokens, int]:
    """The first ``limit`` tokens of each document, and how many documents were shortened.

    Many short documents give smaller errors than a few long ones for the same work.
    """
    if tokens.joined_at is not None:
        raise OptionError("--document-tokens: the method joins all texts into one document", fix="use sliding-once")
    lengths = np.diff(tokens.doc_starts)
    cut_lengths = np.minimum(lengths, limit)
    inside = np.arange(len(tokens)) - np.repeat(tokens.doc_starts[:-1], lengths) < limit
    document = np.repeat(np.arange(len(lengths)), cut_lengths)

    def counted(of_token: Ids, of_document: Ints) -> Ints:
        """A count per document: of its kept tokens if it was shortened, else of the whole document."""
        counts = np.bincount(document, of_token[inside], minlength=len(of_document)).astype(np.int64)
        return frozen(np.where(cut_lengths < lengths, counts, of_document))

    columns: dict[str, Any] = {n: frozen(column[inside]) for n in COLUMNS if (column := getattr(tokens, n)) is not None}
    cut = replace(
        tokens,
        **columns,
        doc_starts=frozen(np.concatenate([[0], np.cumsum(cut_lengths)]).astype(np.int64)),
        doc_bytes=counted(tokens.byte_len, tokens.doc_bytes),
        doc_words=counted(tokens.word_starts, tokens.doc_words),
    )
    return cut, int((cut_lengths < lengths).sum())


def byte_lengths(text: str, ends: Ints) -> Ids:
    """How many UTF-8 bytes each token owns: those from the end of the token before it to its own end."""
    lengths, start = np.empty(len(ends), np.int32), 0
    for begin in range(0, len(lengths), BLOCK):  # a long text needs several times its own memory at once otherwise
        here = ends[begin : begin + BLOCK]
        piece, edges = text[start : here[-1]], np.concatenate([[0], here - start])
        if not piece.isascii():
            points = np.frombuffer(piece.encode("utf-32-le"), dtype=np.uint32)
            edges = np.concatenate([[0], np.cumsum(utf8_sizes(points), dtype=np.int64)])[edges]
        lengths[begin : begin + BLOCK] = np.diff(edges)
        start = int(here[-1])
    return lengths


def utf8_sizes(points: npt.NDArray[np.uint32]) -> Ints:
    """The bytes of each character, by its code point."""
    return 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)


def word_starts_in(text: str, ends: Ints) -> Ids:
    """How many words begin inside each token."""
    starts = np.fromiter((word.start() for word in re.finditer(r"\S+", text)), np.int64)
    tokens = np.searchsorted(ends, starts, side="right")  # words after the last token are those of no token
    return np.bincount(tokens, minlength=len(ends) + 1)[: len(ends)].astype(np.int32)


def _inside(starts: Ints, ends: Ints, spans: tuple[tuple[int, int], ...]) -> Bools:
    """Which tokens own at least one character of the spans."""
    mask = np.zeros(len(ends), dtype=np.bool_)
    for begin, end in spans:
        mask |= (ends > begin) & (starts < end)
    return mask & (ends > starts)


# ── ids that another program stored ───────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class SpelledIds:
    """The text that ids stand for."""

    text: str
    raw: bytes
    ends: Ints  # (n,) characters of the text up to the end of each token
    byte_len: Ids  # (n,)
    lone: int  # bytes that belong to no character

    @staticmethod
    def of(ids: Ids, vocabulary: list[bytes]) -> SpelledIds:
        """Joins the bytes of tokens, so that a character that was cut into several tokens is whole again."""
        pieces = [vocabulary[i] if i < len(vocabulary) else b"" for i in ids.tolist()]
        raw = b"".join(pieces)
        points = np.frombuffer(raw.decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass"), np.uint32)
        lone = (points >= LONE[0]) & (points <= LONE[1])
        text = np.where(lone, ord("�"), points).astype(np.uint32).tobytes().decode("utf-32-le")
        sizes = np.where(lone, 1, utf8_sizes(points))
        begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # of each character, in bytes
        ends = np.searchsorted(begins[:-1], np.cumsum([len(piece) for piece in pieces], dtype=np.int64), side="left")
        starts = np.concatenate([[0], ends[:-1]])[: len(ends)]
        return SpelledIds(text, raw, ends, (begins[ends] - begins[starts]).astype(np.int32), int(lone.sum()))


def tokens_of_ids(ids: Sequence[Ids], spelled: Sequence[SpelledIds], tokenizer: TextTokenizer) -> Tokens:
    """Documents whose ids and texts are known, as one stream."""
    return Tokens(
        ids=frozen(np.concatenate(ids).astype(np.int32)),
        doc_starts=frozen(np.cumsum([0, *map(len, ids)], dtype=np.int64)),
        char_end=frozen(np.concatenate([document.ends for document in spelled]).astype(np.int64)),
        byte_len=frozen(np.concatenate([document.byte_len for document in spelled])),
        word_starts=frozen(np.concatenate([word_starts_in(document.text, document.ends) for document in spelled])),
        doc_bytes=frozen(np.array([len(document.raw) for document in spelled], np.int64)),
        doc_words=frozen(np.array([count_words(document.text) for document in spelled], np.int64)),
        tokenizer=tokenizer.facts,
    )


def lone_bytes(lone: int) -> str:
    return f"{lone:,} byte{'s' if lone > 1 else ''} of the stored tokens are not UTF-8, and are shown as �"
