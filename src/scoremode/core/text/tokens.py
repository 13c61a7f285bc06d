"""Documents ─▶ Tokens: one stream of ids, with each token's position in the text, its bytes and its words.

Ids that somebody else cut become Tokens as well (``text_of_ids``), and the text again, as far as the ids tell it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.core.text.corpus import Corpus
from scoremode.core.text.documents import Document, RereadDocuments, WordCounter, white_space
from scoremode.core.text.long_text import EncodedPart, encode_parts
from scoremode.core.text.slices import Slicing
from scoremode.core.text.tokenizer import Encoding, TextTokenizer, TokenizerFacts
from scoremode.errors import OptionError
from scoremode.values import Bools, Ids, Ints, frozen

OURS = 0.99  # share of the tokens that a tokenizer must cut in the same way, not to be doubted
BLOCK = 1 << 14  # tokens whose bytes are counted together
LONE = (0xDC80, 0xDCFF)  # code points that stand for bytes which are not UTF-8


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Documents as one stream of ids; document d is ``ids[doc_starts[d]:doc_starts[d + 1]]``.

    The columns of a long text lie on disk, perhaps in smaller types of numbers than those named here (an earlier
    version wrote them): convert what you take.
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


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """Consecutive tokens of one document: a part of the columns of ``Tokens``."""

    ids: Ids
    char_end: Ints
    byte_len: Ids
    word_starts: Ids
    mask: Bools | None
    slices: Ids | None = None


class TokenStream:
    """The tokens of documents, in blocks that are made as they are asked for. Each pass reads the documents again."""

    def __init__(self, documents: Iterable[Document], tokenizer: TextTokenizer, *, special: bool) -> None:
        self.documents, self.tokenizer, self.special = documents, tokenizer, special
        self.index: dict[str, Any] = {}  # what is known after the last block, by field of ``Tokens``

    def __iter__(self) -> Iterator[TokenBlock]:
        reading = deque[Document]()

        def texts() -> Iterator[Document]:
            for document in self.documents:
                reading.append(document)  # several are read before the first is encoded
                yield document

        doc_starts, doc_bytes, doc_words, joined_at = array("q", [0]), array("q"), array("q"), array("q")
        slicing: Slicing | None = None
        reader: _BlockReader | None = None
        for part in encode_parts(texts(), self.tokenizer, special=self.special):
            reader = reader or _BlockReader(reading[0], doc_starts[-1])
            if len(part.ids):
                yield reader.block(part)
            else:
                reader.unowned += part.text
            if not part.is_last:
                continue
            document = reading.popleft()
            doc_starts.append(reader.count)
            doc_bytes.append(document.source_bytes)
            doc_words.append(document.source_words)
            joined_at.extend(reader.joined_at())
            slicing, reader = document.slices.slicing if document.slices else None, None
        self.index = {
            "doc_starts": np.array(doc_starts, np.int64),
            "doc_bytes": np.array(doc_bytes, np.int64),
            "doc_words": np.array(doc_words, np.int64),
            "joined_at": np.unique(np.array(joined_at, np.int64)) if joined_at else None,
            "slice_names": slicing.names if slicing else (),
            "notes": slicing.finish() if slicing else (),
        }

    def in_memory(self) -> Tokens:
        """All tokens in memory, for a text that is not long."""
        blocks = [*self]
        columns: dict[str, Any] = {
            name: np.concatenate([np.zeros(0, kind), *(getattr(block, name) for block in blocks)], dtype=kind)
            for name, kind in (("ids", "i4"), ("char_end", "i8"), ("byte_len", "i4"), ("word_starts", "i4"))
        }
        for name, column in (("target_mask", "mask"), ("slices", "slices")):
            parts = [part for block in blocks if (part := getattr(block, column)) is not None]
            columns[name] = np.concatenate(parts) if parts and len(parts) == len(blocks) else None
        columns |= self.index
        for column in columns.values():
            if isinstance(column, np.ndarray):
                frozen(column)
        return Tokens(**columns, tokenizer=self.tokenizer.facts)


class _BlockReader:
    """Makes blocks of one document's tokens as they arrive."""

    def __init__(self, document: Document, count: int) -> None:
        self.document, self.count = document, count  # count: tokens of all documents so far
        self._at, self._after_space = 0, True  # characters that are owned; is the last of them white space?
        self.unowned = ""  # characters after the last token of a part: the next token owns them
        self._joined, self._resolved = array("q"), 0  # tokens at which texts begin; positions that are tokens already

    def block(self, part: EncodedPart) -> TokenBlock:
        slices, text = self.document.slices, self.unowned + part.text
        ends = np.where(part.ends > 0, part.ends + len(self.unowned), 0)
        owned, self.unowned = text[: int(ends[-1])], text[int(ends[-1]) :]
        starts = np.concatenate([[0], ends[:-1]]) + self._at
        made = TokenBlock(
            ids=part.ids,
            char_end=ends + self._at,
            byte_len=byte_lengths(owned, ends),
            word_starts=word_starts_in(owned, ends, after_space=self._after_space),
            mask=_inside(starts, ends + self._at, self.document.scored_spans),
            slices=None if slices is None else slices.label(starts, ends + self._at),
        )
        self._resolve(ends)
        self._at += len(owned)
        self.count += len(part.ids)
        self._after_space = owned[-1].isspace() if owned else self._after_space
        return made

    def _resolve(self, ends: Ints) -> None:
        """Finds where texts begin: at the first token that ends after the first character of the text."""
        waiting = np.array(self.document.joined_at[self._resolved :], np.int64)
        known = waiting[waiting < self._at + int(ends[-1])]
        self._joined.extend((self.count + np.searchsorted(ends, known - self._at, side="right")).tolist())
        self._resolved += len(known)

    def joined_at(self) -> array[int]:
        """The tokens at which texts begin, for a document that was read to its end."""
        self._joined.extend([self.count] * (len(self.document.joined_at) - self._resolved))
        return self._joined


def tokenize(documents: Iterable[Document], tokenizer: TextTokenizer, *, special: bool) -> Tokens:
    return TokenStream(documents, tokenizer, special=special).in_memory()


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

    def counted(of_token: Ids, of_document: Ints) -> Ints:
        """A count per document: of its kept tokens if it was shortened, else of the whole document."""
        found = np.bincount(document, of_token[inside], minlength=len(of_document)).astype(np.int64)
        return frozen(np.where(kept < lengths, found, of_document))

    cut = replace(
        tokens,
        ids=frozen(tokens.ids[inside]),
        doc_starts=frozen(np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)),
        char_end=frozen(tokens.char_end[inside]),
        byte_len=frozen(tokens.byte_len[inside]),
        word_starts=frozen(tokens.word_starts[inside]),
        doc_bytes=counted(tokens.byte_len, tokens.doc_bytes),
        doc_words=counted(tokens.word_starts, tokens.doc_words),
        target_mask=None if tokens.target_mask is None else frozen(tokens.target_mask[inside]),
        slices=None if tokens.slices is None else frozen(tokens.slices[inside]),
    )
    return cut, int((kept < lengths).sum())


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


def word_starts_in(text: str, ends: Ints, *, after_space: bool = True) -> Ids:
    """How many words begin inside each token."""
    counts = np.zeros(len(ends) + 1, np.int64)  # the last: words after the last token
    for begin, space, follows in white_space(text, after_space):
        starts = begin + np.flatnonzero(~space & follows)
        counts += np.bincount(np.searchsorted(ends, starts, side="right"), minlength=len(counts))
    return counts[:-1].astype(np.int32)


def _inside(starts: Ints, ends: Ints, spans: tuple[tuple[int, int], ...] | None) -> Bools | None:
    """Which tokens own at least one character of the spans."""
    if spans is None:
        return None
    mask = np.zeros(len(ends), dtype=np.bool_)
    for begin, end in spans:
        mask |= (ends > begin) & (starts < end)
    return mask & (ends > starts)


# ── ids that somebody else cut ───────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class SpelledIds:
    """The text that ids stand for."""

    text: str
    raw: bytes
    ends: Ints  # (n,) characters of the text up to the end of each token
    byte_len: Ids  # (n,)
    lone: int  # bytes that belong to no character

    @staticmethod
    def of(ids: Ids, known: list[bytes]) -> SpelledIds:
        """Joins the bytes of tokens, so that a character that was cut into several tokens is whole again."""
        pieces = [known[i] if i < len(known) else b"" for i in ids.tolist()]
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
        char_end=frozen(np.concatenate([one.ends for one in spelled]).astype(np.int64)),
        byte_len=frozen(np.concatenate([one.byte_len for one in spelled])),
        word_starts=frozen(np.concatenate([word_starts_in(one.text, one.ends) for one in spelled])),
        doc_bytes=frozen(np.array([len(one.raw) for one in spelled], np.int64)),
        doc_words=frozen(np.array([WordCounter(one.text).count for one in spelled], np.int64)),
        tokenizer=tokenizer.facts,
    )


def lone_bytes(lone: int) -> str:
    return f"{lone:,} byte{'s' if lone > 1 else ''} of the stored tokens are not UTF-8, and are shown as �"


def text_of_ids(ids: Ids, tokenizer: TextTokenizer, name: str) -> tuple[Corpus, RereadDocuments, Tokens]:
    """The text that ids stand for: one document, and its tokens with exactly these ids.

    A byte that belongs to no character is shown as �, counts as one byte, and is counted in a note.
    """
    spelled = SpelledIds.of(ids, tokenizer.pieces())
    text, ends, whole = spelled.text, spelled.ends, spelled.raw
    starts = np.concatenate([[0], ends[:-1]])
    encoding = Encoding(ids, starts, ends, starts)
    notes = tuple(_notes(text, encoding, tokenizer, spelled.lone))
    corpus = Corpus(name, "text", lambda: iter([text]), hashlib.sha256(whole).hexdigest(), 1, len(whole), notes=notes)
    return corpus, RereadDocuments(corpus, "texts", tokenizer), tokens_of_ids([ids], [spelled], tokenizer)


def _notes(text: str, stored: Encoding, tokenizer: TextTokenizer, lone: int) -> Iterator[str]:
    if lone:
        yield lone_bytes(lone)
    visible = stored.char_end > stored.char_start
    own = tokenizer.encode(text, special=False)
    alike = np.isin(_places(stored.ids[visible], stored.char_end[visible]), _places(own.ids, own.char_end))
    if len(alike) and alike.mean() < OURS:
        yield (
            f"the candidate's tokenizer cuts only {alike.mean():.1%} of this text into the stored tokens: "
            "is it the tokenizer of the baseline?"
        )


def _places(ids: Ids, ends: Ints) -> Ints:
    """Combines the id of a token and the position of its end into one number."""
    found: Ints = ends.astype(np.int64) << 32 | ids.astype(np.int64)
    return found
