"""Texts ─▶ tokens, part by part. The ids are the same as if each text were encoded at once.

A long text is cut where the tokenizer's pre-tokenizer ends a word, because each word is encoded alone. Such a place is
before white space or after a single newline, so it does not depend on how the words before it were found. AROUND
characters on either side of it must also have the same words, ids and positions together as apart: some tokenizers put
a space in front of a text, strip it, or join words with what follows.

A tokenizer without such a pre-tokenizer, or of an engine, encodes each text at once. So does every tokenizer where a
text has no such place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer, encode_many
from scoremode.values import Ids, Ints

PART = 1 << 16  # characters of a part, at least
REACH = 1 << 13  # characters after them in which a place to cut is looked for
AROUND = 1 << 9  # characters on either side of it that must have the same tokens together as apart
TRIED = 64  # the most places that are tried per part
TOGETHER, MOST_TEXTS = 1 << 20, 1024  # characters and texts that are encoded per call
ENDS_OF_WORDS = re.compile(r"(?<=\S)(?=\s)|(?<=\S\n)(?=\S)")


class Part(NamedTuple):
    text: str
    is_first: bool
    is_last: bool

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last


class EncodedPart(NamedTuple):
    text: str
    ids: Ids  # (n,)
    ends: Ints  # (n,) each token owns the characters from the previous token's end up to here
    is_last: bool


def encode_parts(texts: Iterable[Iterable[str]], tokenizer: TextTokenizer, *, special: bool) -> Iterator[EncodedPart]:
    """Yields the tokens of all texts, which are given in pieces."""
    cutter = _Cutter(tokenizer, special=special)
    batch, size = list[Part](), 0
    for part in (part for pieces in texts for part in cutter.parts(pieces)):
        if batch and (size + len(part.text) > TOGETHER or len(batch) == MOST_TEXTS):
            yield from cutter.encoded(batch)
            batch, size = [], 0
        batch.append(part)
        size += len(part.text)
    yield from cutter.encoded(batch)


class _Cutter:
    def __init__(self, tokenizer: TextTokenizer, *, special: bool) -> None:
        self.tokenizer, self.special = tokenizer, special
        self.before = self.after = np.zeros(0, np.int32)  # the special tokens of a text
        self.cuts = isinstance(tokenizer, ByteTokenizer)
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.backend.pre_tokenizer is not None:
            self.cuts = not special or self._learn_special_tokens()

    def _learn_special_tokens(self) -> bool:
        """Learns which tokens are put before and after a text. Returns False if special tokens change others."""
        plain, full = (self.tokenizer.encode("a b", special=special).ids for special in (False, True))
        for lead in range(len(full) - len(plain) + 1):
            if np.array_equal(full[lead : lead + len(plain)], plain):
                self.before, self.after = full[:lead], full[lead + len(plain) :]
                return True
        return False

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def parts(self, pieces: Iterable[str]) -> Iterator[Part]:
        held, size, wanted, is_first = list[str](), 0, PART, True
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            if not self.cuts or size <= wanted + REACH:
                continue
            text, begin = "".join(held), 0
            while len(text) - begin > wanted + REACH:
                end = self._place(text, begin + wanted)
                if end is None:
                    wanted *= 2
                    continue
                yield Part(text[begin:end], is_first, is_last=False)
                begin, wanted, is_first = end, PART, False
            held, size = [text[begin:]], len(text) - begin
        yield Part("".join(held), is_first, is_last=True)

    def _place(self, text: str, begin: int) -> int | None:
        """Returns the first place from ``begin`` on at which the text can be cut; None if there is none in reach."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return begin
        places = (found.start() for found in ENDS_OF_WORDS.finditer(text, begin, begin + REACH - AROUND))
        tried = islice(places, TRIED)
        return next((at for at in tried if self._can_cut(text[at - AROUND : at], text[at : at + AROUND])), None)

    def _can_cut(self, left: str, right: str) -> bool:
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        normalizer, pre_tokenizer = self.tokenizer.backend.normalizer, self.tokenizer.backend.pre_tokenizer
        before, after, both = (
            text if normalizer is None else normalizer.normalize_str(text) for text in (left, right, left + right)
        )
        words = (place for _, place in pre_tokenizer.pre_tokenize_str(both))
        if before + after != both or any(begin < len(before) < end for begin, end in words):
            return False
        found = encode_many(self.tokenizer, [left + right, left, right])
        middle, ends = int(found.bounds[1]), found.char_end - len(left + right)
        return np.array_equal(found.ids[:middle], found.ids[middle:]) and np.array_equal(
            found.char_end[:middle], ends[middle:]
        )

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def encoded(self, batch: list[Part]) -> Iterator[EncodedPart]:
        """Encodes a batch. A text that was cut has its special tokens before the first and after the last part."""
        whole, parts = ([part.text for part in batch if part.is_whole is kind] for kind in (True, False))
        of_whole, of_parts = self._encoded(whole, special=self.special), self._encoded(parts, special=False)
        for part in batch:
            ids, ends = next(of_whole if part.is_whole else of_parts)
            if not part.is_whole:
                before = self.before if part.is_first else self.before[:0]
                after = self.after if part.is_last else self.after[:0]
                ids = np.concatenate([before, ids, after])
                ends = np.pad(ends, (len(before), 0))
                ends = np.pad(ends, (0, len(after)), constant_values=ends.max(initial=0))
            yield EncodedPart(part.text, ids, ends, part.is_last)

    def _encoded(self, texts: list[str], *, special: bool) -> Iterator[tuple[Ids, Ints]]:
        if texts:
            found = encode_many(self.tokenizer, texts, special=special)
            for i, start in enumerate(found.starts[:-1]):
                mine = slice(found.bounds[i], found.bounds[i + 1])
                yield found.ids[mine], found.char_end[mine] - start
