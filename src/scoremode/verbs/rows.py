"""Where each target stands in its text, and the texts of ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from scoremode.plan.plan import TargetBlock
from scoremode.scores.columns import CodedTexts, Scores, TargetFacts
from scoremode.scores.journal import Journal
from scoremode.scores.parquet import Rows
from scoremode.statistics.groups import Grouping, grouping, weights_of
from scoremode.text.tokenizer import TextTokenizer
from scoremode.values import Ids
from scoremode.verbs.question import Question


def rows_to_keep(asked: Question, journal: Journal) -> Iterator[Rows]:
    words, groups = Words(asked.subject.tokenizer), grouping(asked.plan)
    for block in asked.plan.blocks():
        scores, kl = journal.rows_and_kl(block.begin, block.end)
        yield Rows(scores, target_facts(asked, block, scores, words, groups), kl)
        asked.tokens.release_pages()


_KNOWN: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
"""Texts of ids, by tokenizer: they stay known from one question to the next."""


class Words:
    """The texts of ids, each made once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._known = _KNOWN.setdefault(tokenizer, {})

    def of(self, ids: Ids) -> list[str]:
        return [*map(self._word, ids.tolist())]

    def coded(self, ids: Ids, top: Ids | None) -> tuple[CodedTexts, CodedTexts | None]:
        """The texts of tokens and of first choices, with one dictionary, so that the two columns can be compared."""
        found, where = np.unique(ids if top is None else np.concatenate([ids, top]), return_inverse=True)
        places: dict[str, int] = {}  # two ids may have the same text
        codes = np.array([places.setdefault(word, len(places)) for word in self.of(found)], np.int32)[where]
        words = list(places)
        return CodedTexts(codes[: len(ids)], words), None if top is None else CodedTexts(codes[len(ids) :], words)

    def _word(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self.tokenizer.token_text(token)
        return self._known[token]


def target_facts(asked: Question, block: TargetBlock, scores: Scores, words: Words, groups: Grouping) -> TargetFacts:
    """Where each target of a block stands in the text, what it is independent of, and the texts of ids."""
    tokens, index = asked.tokens, block.token
    text, top_text = words.coded(tokens.ids[index], scores.top)
    return TargetFacts(
        window=block.window,
        document=block.document,
        token=index,
        id=tokens.ids[index],
        byte_len=tokens.byte_len[index].astype(np.int32),
        word_starts=tokens.word_starts[index].astype(np.int32),
        group=groups.of(block),
        weight=weights_of(asked.plan, block),
        text=cast(Any, text),
        top_text=cast(Any, top_text),
    )
