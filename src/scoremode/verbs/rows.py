"""Where each target stands in its text, and the words that ids stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from scoremode.plan.plan import TargetBlock
from scoremode.statistics.groups import Grouping, grouping, weights_of
from scoremode.store.columns import Rows
from scoremode.store.journal import Journal
from scoremode.store.scores import Scores, TargetFacts
from scoremode.text.reading import Excerpts
from scoremode.text.tokenizer import TextTokenizer
from scoremode.text.tokens import Document
from scoremode.values import Ids
from scoremode.verbs.question import Question


def rows_to_keep(asked: Question, journal: Journal) -> Iterator[Rows]:
    words, groups = Words(asked.subject.tokenizer, asked.documents), grouping(asked.plan)
    for block in asked.plan.blocks():
        scores = journal.rows(block.begin, block.end)
        kl = None if journal.kl is None else journal.kl[block.begin : block.end]
        yield Rows(scores, target_facts(asked, block, scores, words, groups), kl)
        asked.tokens.let_go()


_KNOWN: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
"""Words that were decoded, by tokenizer: they stay known from one question to the next."""


class Words:
    """What ids stand for, each decoded once, and the words of the text itself."""

    def __init__(self, tokenizer: TextTokenizer, documents: Sequence[Document] = ()) -> None:
        self.tokenizer, self.source = tokenizer, Excerpts(documents)
        self._known = _KNOWN.setdefault(tokenizer, {})

    def of(self, ids: Ids) -> Any:
        return np.array([*map(self._word, ids.tolist()), None], dtype=object)[:-1]  # None: never an array of characters

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
        text=_source_pieces(asked, block, words),
        top_text=None if scores.top is None else words.of(scores.top),
    )


def _source_pieces(asked: Question, block: TargetBlock, words: Words) -> Any:
    """The characters of the source that each target stands for; the token's own name if there are none."""
    pieces = np.empty(len(block), dtype=object)
    starts, ends = asked.tokens.char_start_of(block.token), asked.tokens.char_end[block.token].astype(np.int64)
    pieces[:] = words.source.at(block.document, starts, ends)
    empty = np.flatnonzero(ends == starts)
    if len(empty):
        pieces[empty] = words.of(asked.tokens.ids[block.token[empty]])
    return pieces
