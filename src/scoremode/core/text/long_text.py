"""Texts ─▶ tokens, a long text in parts. The ids are the same as if it were encoded at once.

A long text is cut where the tokenizer's pre-tokenizer ends a word, because each word is encoded alone. Such a place is
before white space or after a single newline, so it does not depend on how the words before it were found. AROUND
characters on either side of it must also have the same words, ids and positions together as apart: some tokenizers put
a space in front of a text, strip it, or join words with what follows.

A tokenizer without such a pre-tokenizer, or of an engine, encodes each text at once, which takes the memory that
``HuggingFaceTokenizer`` says. So does every tokenizer where a text has no such place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import numpy as np

from scoremode.core import free_memory
from scoremode.core.reading import megabytes, require_memory
from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer, encode_many
from scoremode.values import Ids, Ints

PART = 1 << 16  # characters of a part, at least
REACH = 1 << 13  # characters after them in which a place to cut is looked for
AROUND = 1 << 9  # characters on either side of it that must have the same tokens together as apart
BYTES_PER_TOKEN = 48  # of memory, while the columns of all tokens are put together
TRIED = 64  # the most places that are tried per part
TOGETHER, MOST_TEXTS = 1 << 20, 1024  # characters and texts that are encoded per call
ENDS_OF_WORDS = re.compile(r"(?<=\S)(?=\s)|(?<=\S\n)(?=\S)")

Encoded = tuple[Ids, Ints]
"""Ids, and where they end: each token owns the characters from the previous token's end up to there."""


def encode_texts(texts: Iterable[str], tokenizer: TextTokenizer, *, special: bool) -> Iterator[Encoded]:
    """Yields the tokens of each text."""
    cutter = _Cutter(tokenizer, special=special)
    batch, size = list[str](), 0
    for text in texts:
        is_long = len(text) > PART + REACH
        if batch and (is_long or size + len(text) > TOGETHER or len(batch) == MOST_TEXTS):
            yield from cutter.together(batch)
            batch, size = [], 0
        if is_long:
            yield cutter.alone(text)
        else:
            batch.append(text)
            size += len(text)
    if batch:
        yield from cutter.together(batch)


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

    def together(self, texts: list[str]) -> Iterator[Encoded]:
        """The tokens of several texts, each as a whole."""
        encoding = encode_many(self.tokenizer, texts, special=self.special)
        for i, start in enumerate(encoding.starts[:-1]):
            mine = slice(encoding.bounds[i], encoding.bounds[i + 1])
            yield encoding.ids[mine], encoding.char_end[mine] - start

    def alone(self, text: str) -> Encoded:
        """The tokens of a long text, in parts if it can be cut."""
        places = self._places(text)
        if len(places) == 2:
            return next(self.together([text]))
        share = len(self.tokenizer.encode(text[:PART], special=False).ids) / PART
        needed = int(BYTES_PER_TOKEN * share * len(text))
        require_memory(f"cutting a text of {megabytes(len(text))} into tokens", needed, free_memory.available())
        ids, ends, several = [self.before], [np.zeros(len(self.before), np.int64)], max(1, TOGETHER // PART)
        for first in range(0, len(places) - 1, several):
            edges = places[first : first + several + 1]
            encoding = encode_many(self.tokenizer, [text[begin:end] for begin, end in pairwise(edges)])
            ids.append(encoding.ids)
            ends.append(encoding.char_end + edges[0])
        last = max(int(some.max(initial=0)) for some in ends)
        return np.concatenate([*ids, self.after]), np.concatenate([*ends, np.full(len(self.after), last)])

    # ── where a text is cut ──────────────────────────────────────────────────────────────────────────────────────────
    def _places(self, text: str) -> list[int]:
        """Where the parts of a text begin, and where the last one ends."""
        places, wanted = [0], PART
        while self.cuts and len(text) - places[-1] > wanted + REACH:
            place = self._place(text, places[-1] + wanted)
            if place is None:
                wanted *= 2
            else:
                places.append(place)
                wanted = PART
        return [*places, len(text)]

    def _place(self, text: str, begin: int) -> int | None:
        """Returns the first place from ``begin`` on at which the text can be cut; None if there is none in reach."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return begin
        places = (match.start() for match in ENDS_OF_WORDS.finditer(text, begin, begin + REACH - AROUND))
        tried = islice(places, TRIED)
        return next((at for at in tried if self._can_cut(text[at - AROUND : at], text[at : at + AROUND])), None)

    def _can_cut(self, left: str, right: str) -> bool:
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        normalizer, pre_tokenizer = self.tokenizer.backend.normalizer, self.tokenizer.backend.pre_tokenizer
        before, after, both = (
            text if normalizer is None else normalizer.normalize_str(text) for text in (left, right, left + right)
        )
        spans = (place for _, place in pre_tokenizer.pre_tokenize_str(both))
        if before + after != both or any(begin < len(before) < end for begin, end in spans):
            return False
        encoding = encode_many(self.tokenizer, [left + right, left, right])
        middle, ends = int(encoding.bounds[1]), encoding.char_end - len(left + right)
        return np.array_equal(encoding.ids[:middle], encoding.ids[middle:]) and np.array_equal(
            encoding.char_end[:middle], ends[middle:]
        )
