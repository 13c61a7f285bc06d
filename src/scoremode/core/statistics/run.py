"""A run's scores ─▶ its metrics with errors: perplexity, bits per byte, ranks, entropy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.core.scores.columns import Scores
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.statistics.estimate import GroupSums, exponential, perplexities, ratio, transformed
from scoremode.core.statistics.groups import character_groups, grouping, weights_of
from scoremode.core.text.tokens import Tokens
from scoremode.values import Estimate, Floats, Ids, Ints


def all_metrics(plan: Plan, tokens: Tokens, scores: Scores) -> dict[str, Estimate]:
    """Returns every metric of a run, except those whose column was not measured."""
    groups, weight, loss, ones = grouping(plan), weights_of(plan), -scores.logprob, np.ones(plan.targets)
    mean = ratio(loss * weight, weight, groups.of_target)
    of_characters = character_groups(plan, groups, tokens.byte_len[plan.target_token])
    nats_per_byte = GroupSums(groups.count)
    nats_per_byte.add(of_characters, loss, _units(plan, tokens.byte_len, tokens.doc_bytes))
    nats_per_word = ratio(loss, _units(plan, tokens.word_starts, tokens.doc_words), groups.of_target)
    return {
        "perplexity": _perplexity_of_texts(plan, scores.logprob) if plan.average == "document" else exponential(mean),
        "mean_nll": mean,
        "bits_per_byte": transformed(nats_per_byte.estimate(), lambda nats: nats / math.log(2), 1 / math.log(2)),
        "word_perplexity": exponential(nats_per_word),
        **{
            metric.name: ratio(
                metric.values(getattr(scores, column.name)), ones, groups.of_target, metric.range(column)
            )
            for column, metric in BUILT_IN.metrics
            if scores.has(column.name)
        },
    }


def _perplexity_of_texts(plan: Plan, logprob: Floats) -> Estimate:
    """The arithmetic mean of exp(mean nll of a document) over all documents."""
    each = perplexities(logprob, plan.target_document)
    return replace(ratio(each, np.ones(len(each)), np.arange(len(each)), "positive"), n=len(logprob))


def _units(plan: Plan, of_token: Ids, of_document: Ints) -> Ids | Floats:
    """The bytes or words of each target; those of whole source documents count at their first targets."""
    if not plan.whole_documents or plan.mask is not None:
        return of_token[plan.target_token]
    share = np.zeros(plan.targets)
    documents, firsts = np.unique(plan.target_document, return_index=True)
    share[firsts] = of_document[documents]
    return share


# ── llama.cpp ────────────────────────────────────────────────────────────────────────────────────────────────────────
class LlamacppMean:
    """The mean of some values, with its error by llama.cpp's rule, as if values were independent."""

    def __init__(self, values: Floats) -> None:
        self.n = len(values)
        self.mean = float(values.mean()) if self.n else 0.0
        self.variance = float((values**2).mean()) - self.mean**2 if self.n else 0.0  # mean of the squares minus mean²

    @property
    def error(self) -> float:
        """The error of the mean, sqrt(variance / (n - 1)); 0 for up to ten values, as in llama.cpp."""
        return math.sqrt(self.variance / (self.n - 1)) if self.n > 10 and self.variance > 0 else 0.0


def llamacpp_stderr(logprob: Floats) -> float | None:
    """Returns the error that llama.cpp prints with its perplexity, as if tokens were independent; None if infinite."""
    nll = LlamacppMean(-logprob)
    if nll.n < 2 or not nll.mean < 700:  # its exponential is infinite
        return None
    return math.exp(nll.mean) * math.sqrt(max(0.0, nll.variance) / (nll.n - 1))
