"""Comparisons on rollouts: what else their texts say, because a model wrote them.

greedy texts                      where each reader parts from them
sampled texts                     what each reader thinks of them
both                              what was written and what the reader prefers, where it is most surprised
the reader                        the candidate; if it wrote them itself, the baseline
neither model is their writer     then the writer's log-probabilities are those of the rollouts
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from scoremode.core.scores.answers import measured
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.estimate import GroupSums, exponential, ratio
from scoremode.core.statistics.statistic import Statistic, computed, estimates, plain
from scoremode.core.store.run import Run
from scoremode.core.text.token_text import joined
from scoremode.core.typed import typed
from scoremode.studies.rollouts.mismatch import in_order_of
from scoremode.studies.rollouts.parting import Partings, partings
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import Estimate, Floats, Ints

MOST_EXAMPLES = 3
BEFORE = 60  # characters of the text before an example


@dataclass(frozen=True, slots=True)
class OtherChoice:
    """A token of a text that the reader would not have written."""

    prompt: int  # numbers of the prompt and of the text among those of its prompt, as in the rollouts
    sample: int
    token: int  # of the written text, from 1
    before: str  # the end of the text before it
    written: str
    prefers: str  # the reader's first choice
    p_writer: float  # probability of ``written`` for its writer
    p_reader: float  # the same for the reader
    p_prefers: float  # probability of ``prefers`` for the reader
    gap: float | None  # nats: ln p_prefers - ln p_reader; None if ``written`` is impossible for the reader


def _ppl_ratio(texts: TextRatios) -> Estimate:
    surprise = ratio(-texts.log_ratios, texts.lengths, texts.groups)
    return exponential(surprise) if math.isfinite(surprise.value) else surprise


class TextRatios:
    """What a reader thinks of the texts that a writer sampled, beside the writer's own log-probabilities.

        log_ratio of a text  = Σ ln reader(token) - ln writer(token) over its tokens
        log_ratio            = mean over texts; for texts from the writer's own distribution, -log_ratio estimates
                               KL(writer‖reader) of whole texts
        ppl_ratio            = exp(-Σ log_ratio / Σ tokens): the reader's perplexity divided by the writer's own

    If each of two models reads the texts of the other, the two ratios show which of them predicts the other better.
    Errors are over prompts, because the samples of one prompt are alike.

    >>> texts = np.repeat(np.arange(5), 2)
    >>> TextRatios(texts, texts, np.full(10, -1.0), np.full(10, -1.5)).log_ratio
    -1.000 ± 0
    """

    log_ratio = Statistic("log_ratio", "mean log-ratio of texts, nats", lambda texts: texts.log_ratios)
    ppl_ratio = Statistic("ppl_ratio", "the reader's perplexity divided by the writer's", of=_ppl_ratio)
    COUNTS = (
        plain("texts", "texts with a token", lambda texts: len(texts.groups)),
        plain("tokens", "their tokens", lambda texts: int(texts.lengths.sum())),
        plain("groups", "prompts", lambda texts: len(np.unique(texts.groups))),
        plain("impossible", "tokens to which the reader gives the probability zero", lambda texts: texts.impossible),
    )

    def __init__(self, text: Ints, group: Ints, writer: Floats, reader: Floats) -> None:
        """One entry per target: the numbers of its text and group, and both models' log-probabilities."""
        numbers, first, index = np.unique(text, return_index=True, return_inverse=True)
        sums = GroupSums(len(numbers))
        sums.add(index.astype(np.int64), reader - writer, np.ones(len(text)))
        self.log_ratios, self.lengths = sums.numerator, sums.denominator  # (texts,)
        self.groups: Ints = np.unique(group[first], return_inverse=True)[1].astype(np.int64)
        self.impossible = int(np.isneginf(reader).sum())

    @cached_property
    def estimates(self) -> dict[str, Any]:
        return estimates((TextRatios.log_ratio, TextRatios.ppl_ratio), self)

    def statistics(self) -> dict[str, Any]:
        """All numbers by name, ready for JSON; None for one that is not known or infinite."""
        return computed((*self.COUNTS, TextRatios.log_ratio, TextRatios.ppl_ratio), self)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the texts of rollouts say about one reader of a comparison. None: they do not say it."""

    writer: str
    reader: str
    partings: Partings | None  # for greedy texts, if the reader's first choices were measured
    read: TextRatios | None  # for sampled texts
    examples: tuple[OtherChoice, ...] = ()

    def as_json(self) -> dict[str, object]:
        results = {"partings": self.partings, "own_texts": self.read}
        statistics = {name: result.statistics() for name, result in results.items() if result is not None}
        examples = [asdict(example) for example in self.examples]
        return {"writer": self.writer, "reader": self.reader, **statistics, "examples": examples}


@typed
def readings(comparisons: Sequence[Comparison], rollouts: Rollouts, count: int | None = None) -> list[Reading]:
    """Returns what the texts of rollouts say about each candidate of comparisons on them, or on the first ``count``."""
    rollouts = rollouts if count is None else rollouts.first(count)
    return [_reading(c, rollouts) for c in comparisons]


def _reading(c: Comparison, rollouts: Rollouts) -> Reading:
    name, reader, writer = c.name, c.candidate, c.baseline if is_writer(c.baseline, rollouts) else None
    if writer is None and is_writer(c.candidate, rollouts):  # who reads its own texts says nothing about the other
        name, reader, writer = c.baseline_name, c.baseline, c.candidate
    reading = Reading(str(rollouts.manifest["model"]), name, None, None)
    is_greedy = rollouts.manifest["sampling"].get("temperature") == 0
    if is_greedy and not reader.scores.has("top"):
        return reading
    order, facts, noise = in_order_of(rollouts, reader), reader.facts, 0.0
    document, group = np.asarray(facts.document)[order], np.asarray(facts.group)[order]
    if is_greedy:
        token, top = np.asarray(facts.id)[order], np.asarray(reader.scores.top)[order]
        if writer is not None and writer.scores.has("top"):  # the gaps that it shows in its own greedy texts are noise
            strays = np.asarray(writer.scores.top) != np.asarray(writer.facts.id)
            noise = float(_gaps(writer)[strays].max(initial=0.0))
        parted = partings(document, group, token, top, _gaps(reader)[order], noise=noise)
        reading = replace(reading, partings=parted)
    else:
        written = np.concatenate(rollouts.raw_logprob)
        if writer is not None:  # by the same path as the reader
            written = writer.scores.logprob[in_order_of(rollouts, writer)]
        reading = replace(reading, read=TextRatios(document, group, written, reader.scores.logprob[order]))
    return replace(reading, examples=other_choices(reader, rollouts, noise))


def is_writer(run: Run, rollouts: Rollouts) -> bool:
    return bool(run.manifest.get("model_fingerprint") == rollouts.manifest.get("model_fingerprint"))


def _gaps(run: Run) -> Floats:
    """How much likelier each first choice is than the text's token."""
    return np.asarray(run.scores.top_logprob) - np.asarray(run.scores.logprob)


def other_choices(reader: Run, rollouts: Rollouts, noise: float = 0.0) -> tuple[OtherChoice, ...]:
    """Finds where a reader is most surprised that its own choice was not written: a token per text, in a few texts.

    It is where the reader's log-probability is farthest below the writer's, of all tokens at which the reader has
    another first choice, by more than ``noise`` nats.
    """
    facts, scores = reader.facts, reader.scores
    if not (scores.has("top") and facts.has("top_text")):
        return ()
    order, gap = in_order_of(rollouts, reader), _gaps(reader)
    other = (np.asarray(scores.top) != np.asarray(facts.id)) & (gap > noise)
    lost = np.concatenate([np.zeros(0), *rollouts.raw_logprob]) - np.asarray(scores.logprob)[order]
    lost = np.where(other[order] & ~np.isnan(lost), lost, -np.inf)
    starts = np.cumsum([0, *map(len, rollouts.written)])
    choices = dict[int, OtherChoice]()
    for at in np.argsort(-lost, kind="stable")[: np.count_nonzero(lost > -np.inf)].tolist():
        text, target = int(np.searchsorted(starts, at, side="right")) - 1, int(order[at])
        if text in choices:
            continue
        earlier = [str(facts.text[i]) for i in order[max(starts[text], at - BEFORE) : at]]
        choices[text] = OtherChoice(
            prompt=int(rollouts.prompt[text]),
            sample=int(rollouts.sample[text]),
            token=at - int(starts[text]) + 1,
            before=(rollouts.prompt_text[text] + joined(earlier))[-BEFORE:],
            written=str(facts.text[target]),
            prefers=str(measured(facts.top_text)[target]),
            p_writer=math.exp(rollouts.raw_logprob[text][at - int(starts[text])]),
            p_reader=math.exp(scores.logprob[target]),
            p_prefers=math.exp(measured(scores.top_logprob)[target]),
            gap=float(gap[target]) if np.isfinite(gap[target]) else None,
        )
        if len(choices) == MOST_EXAMPLES:
            break
    return tuple(choices.values())
