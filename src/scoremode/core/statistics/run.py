"""A run's scores ─▶ its metrics with errors: perplexity, bits per byte, ranks, entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from scoremode.core.plan.plan import Plan, TargetBlock
from scoremode.core.scores.columns import Scores
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.statistics.estimate import GroupSums, exponential, transformed
from scoremode.core.statistics.groups import CharacterGroups, distinct, grouping, weights_of
from scoremode.core.statistics.streams import LlamacppMean
from scoremode.core.text.tokens import Tokens
from scoremode.values import Bools, Estimate, Floats, Ids, Ints, Range


class ScoreRows(Protocol):
    """Scores that can be read in parts, from memory or from a journal."""

    def rows(self, begin: int, end: int) -> Scores: ...


def all_metrics(plan: Plan, tokens: Tokens, scores: ScoreRows) -> dict[str, Estimate]:
    """Returns every metric of a run, except those whose column was not measured."""
    groups = grouping(plan)
    nll, nats_per_byte, nats_per_word = (GroupSums(groups.count) for _ in range(3))
    more: dict[str, tuple[GroupSums, Range]] = {}  # metric name ─▶ its sums
    texts = _PerplexityOfTexts(plan) if plan.average == "document" else None
    bytes_of = _units(plan, tokens.byte_len, tokens.doc_bytes)
    words_of = _units(plan, tokens.word_starts, tokens.doc_words)
    characters = CharacterGroups(groups)
    for block in plan.blocks():
        here, index = scores.rows(block.begin, block.end), groups.of(block)
        loss, weight, ones = -here.logprob, weights_of(plan, block), np.ones(len(block))
        nll.add(index, loss * weight, weight)
        nats_per_byte.add(characters.of(block, tokens.byte_len[block.token]), loss, bytes_of(block))
        nats_per_word.add(index, loss, words_of(block))
        for column, metric in BUILT_IN.metrics:
            if here.has(column.name):
                values = metric.values(getattr(here, column.name))
                own = more.setdefault(metric.name, (GroupSums(groups.count), metric.range(column)))
                own[0].add(index, values, ones)
        if texts:
            texts.add(block, loss)
        tokens.release_pages()
    mean = nll.estimate()
    return {
        "perplexity": texts.estimate() if texts else exponential(mean),
        "mean_nll": mean,
        "bits_per_byte": transformed(nats_per_byte.estimate(), lambda nats: nats / math.log(2), 1 / math.log(2)),
        "word_perplexity": exponential(nats_per_word.estimate()),
        **{name: sums.estimate(within) for name, (sums, within) in more.items()},
    }


class _PerplexityOfTexts:
    """The arithmetic mean of exp(mean nll of a document) over all documents."""

    def __init__(self, plan: Plan) -> None:
        self.documents = distinct(block.document for block in plan.blocks())
        self.nll = GroupSums(len(self.documents))

    def add(self, block: TargetBlock, nll: Floats) -> None:
        self.nll.add(np.searchsorted(self.documents, block.document), nll, np.ones(len(nll)))

    def estimate(self) -> Estimate:
        with np.errstate(over="ignore"):
            each = np.exp(self.nll.numerator / self.nll.denominator)
        texts = GroupSums(len(each))
        texts.add(np.arange(len(each)), each, np.ones(len(each)))
        return replace(texts.estimate("positive"), n=self.nll.n)


def _units(plan: Plan, of_token: Ids, of_document: Ints) -> Callable[[TargetBlock], Ids | Floats]:
    """Returns a function that counts bytes or words per target; lm-eval-rolling counts whole source documents."""
    if plan.method != "lm-eval-rolling" or plan.mask is not None:
        return lambda block: of_token[block.token]
    seen: Bools = np.zeros(len(of_document), np.bool_)

    def at_first_targets(block: TargetBlock) -> Floats:
        """Counts all bytes or words of a document at its first target."""
        share = np.zeros(len(block))
        documents, firsts = np.unique(block.document, return_index=True)
        new = ~seen[documents]
        share[firsts[new]] = of_document[documents[new]]
        seen[documents] = True
        return share

    return at_first_targets


def llamacpp_stderr(logprob: Iterable[Floats], n: int) -> float | None:
    """Returns the error that llama.cpp prints with its perplexity, as if tokens were independent; None if infinite.

    ``logprob`` are the blocks of a column of n values.
    """
    if n < 2:
        return None
    nll = LlamacppMean(n)
    for block in logprob:
        nll.add(-block)
    error = math.exp(nll.mean) * math.sqrt(max(0.0, nll.variance) / (n - 1)) if math.isfinite(nll.mean) else math.inf
    return error if math.isfinite(error) else None
