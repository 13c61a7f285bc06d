"""Texts that one model sampled, as another model reads them.

    log_ratio of a text  = Σ ln reader(token) - ln writer(token) over its tokens
    log_ratio            = mean over texts; for texts from the writer's own distribution, -log_ratio estimates
                           KL(writer‖reader) of whole texts
    ppl_ratio            = exp(-Σ log_ratio / Σ tokens): the reader's perplexity divided by the writer's own

If each of two models reads the texts of the other, the two ratios show which of them predicts the other better.
Errors are over prompts, because the samples of one prompt are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.statistics.estimate import GroupSums, exponential, with_error_fields
from scoremode.errors import RunError
from scoremode.values import Estimate, Floats, Ints


@dataclass(frozen=True, slots=True)
class OwnTexts:
    """What a reader thinks of the texts of a writer."""

    log_ratio: Estimate  # nats per text
    ppl_ratio: Estimate
    tokens: int
    impossible: int  # tokens to which the reader gives the probability zero

    def statistics(self) -> dict[str, Any]:
        """Returns all numbers by name, ready for JSON; None for one that is not known or infinite."""
        return {
            "texts": self.log_ratio.n,
            "tokens": self.tokens,
            "groups": self.log_ratio.groups,
            "impossible": self.impossible,
            **with_error_fields("log_ratio", self.log_ratio),
            **with_error_fields("ppl_ratio", self.ppl_ratio),
        }


def own_texts(text: Ints, group: Ints, writer: Floats, reader: Floats) -> OwnTexts:
    """Reads the writer's texts: its own log-probabilities of the tokens, and the reader's; one entry per target.

    >>> texts = np.repeat(np.arange(5), 2)
    >>> own_texts(texts, texts, np.full(10, -1.0), np.full(10, -1.5)).log_ratio
    -1.000 ± 0
    """
    assert len(text) == len(group) == len(writer) == len(reader), "one entry per target"
    if np.isnan(writer).any() or np.isnan(reader).any() or np.isneginf(writer).any():
        raise RunError("a log-probability is NaN, or that of a sampled token is -inf", fix="score again with --fresh")
    numbers, index = np.unique(text, return_inverse=True)
    per_text = GroupSums(len(numbers))
    per_text.add(index.astype(np.int64), reader - writer, np.ones(len(text)))
    of_text = np.zeros(len(numbers), np.int64)
    of_text[index] = group
    groups, of_text = np.unique(of_text, return_inverse=True)
    by_text, by_token = GroupSums(len(groups)), GroupSums(len(groups))
    by_text.add(of_text, per_text.numerator, np.ones(len(numbers)))
    by_token.add(of_text, -per_text.numerator, per_text.denominator)
    surprise = by_token.estimate()
    known = math.isfinite(surprise.value)
    return OwnTexts(
        log_ratio=by_text.estimate(),
        ppl_ratio=exponential(surprise) if known else surprise,
        tokens=len(text),
        impossible=int(np.isneginf(reader).sum()),
    )
