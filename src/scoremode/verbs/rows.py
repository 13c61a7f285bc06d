"""Where each target stands in its text, and the words that ids stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from scoremode.plan.plan import TargetBlock
from scoremode.statistics.groups import Grouping, grouping, weights_of
from scoremode.store.columns import Rows
from scoremode.store.journal import Journal
from scoremode.store.scores import CodedTexts, Scores, TargetFacts
from scoremode.text.reading import Excerpts
from scoremode.text.tokenizer import TextTokenizer
from scoremode.text.tokens import Document
from scoremode.values import Ids, Ints
from scoremode.verbs.question import Question

MANY = 1 << 18  # targets from which on texts are compared by pyarrow, whose import takes a tenth of a second


def rows_to_keep(asked: Question, journal: Journal) -> Iterator[Rows]:
    words, groups = Words(asked.subject.tokenizer, asked.documents), grouping(asked.plan)
    for block in asked.plan.blocks():
        scores, kl = journal.rows_and_kl(block.begin, block.end)
        yield Rows(scores, target_facts(asked, block, scores, words, groups), kl)
        asked.tokens.let_go()


_KNOWN: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
"""Words that were decoded, by tokenizer: they stay known from one question to the next."""


class Words:
    """What ids stand for, each decoded once, and the words of the text itself."""

    def __init__(self, tokenizer: TextTokenizer, documents: Sequence[Document] = ()) -> None:
        self.tokenizer, self.source = tokenizer, Excerpts(documents)
        self._known = _KNOWN.setdefault(tokenizer, {})

    def of(self, ids: Ids) -> list[str]:
        return [*map(self._word, ids.tolist())]

    def coded(self, ids: Ids) -> CodedTexts:
        """As ``of``, each word once: two ids may stand for the same one."""
        found, where = np.unique(ids, return_inverse=True)
        places: dict[str, int] = {}
        codes = np.array([places.setdefault(word, len(places)) for word in self.of(found)], np.int32)
        return CodedTexts(codes[where], list(places))

    def _word(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self.tokenizer.decode([token])
        return self._known[token]


def target_facts(asked: Question, block: TargetBlock, scores: Scores, words: Words, groups: Grouping) -> TargetFacts:
    """Where each target of a block stands in the text, what it is independent of, and the words that ids stand for."""
    tokens, index = asked.tokens, block.token
    return TargetFacts(
        window=block.window,
        document=block.document,
        token=index,
        id=tokens.ids[index],
        byte_len=tokens.byte_len[index].astype(np.int32),
        word_starts=tokens.word_starts[index].astype(np.int32),
        group=groups.of(block),
        weight=weights_of(asked.plan, block),
        text=cast(Any, _source_pieces(asked, block, words)),
        top_text=None if scores.top is None else cast(Any, words.coded(scores.top)),
    )


def _source_pieces(asked: Question, block: TargetBlock, words: Words) -> CodedTexts:
    """The characters of the source that each target stands for; the token's own name if there are none."""
    starts, ends = asked.tokens.char_start_of(block.token), asked.tokens.char_end[block.token].astype(np.int64)
    empty = np.flatnonzero(ends == starts)
    names = words.of(asked.tokens.ids[block.token[empty]])
    if asked.plan.targets >= MANY and np.all(np.diff(block.document) >= 0):
        return _coded_by_pyarrow(*words.source.joined(block.document, starts, ends), empty, names)
    pieces = words.source.at(block.document, starts, ends)
    for place, name in zip(empty.tolist(), names, strict=True):
        pieces[place] = name
    codes: dict[str, int] = {}
    return CodedTexts(np.array([codes.setdefault(piece, len(codes)) for piece in pieces], np.int32), list(codes))


def _coded_by_pyarrow(data: npt.NDArray[np.uint8], edges: Ints, empty: Ints, names: list[str]) -> CodedTexts:
    """As many texts as there are edges but one, in one buffer. Those that are empty get names."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(edges.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    coded = pa.Array.from_buffers(pa.string(), len(edges) - 1, buffers).dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    words: list[str] = coded.dictionary.to_pylist()
    if len(empty):
        places = {word: place for place, word in enumerate(words)}
        codes = codes.copy()
        codes[empty] = [places.setdefault(name, len(places)) for name in names]
        words = list(places)
    return CodedTexts(codes, words)
