"""Comparisons on rollouts: what else their texts say, because a model wrote them.

greedy texts                      where each reader parts from them
sampled texts                     what each reader thinks of them
both                              what was written and what the reader prefers, where it is most surprised;
                                  if asked for, tokens per step if it drafted for their writer
the reader                        the candidate; if it wrote them itself, the baseline
neither model is their writer     then the writer's log-probabilities are those of the rollouts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from typing import Any

import numpy as np

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.core.text.token_text import joined
from scoremode.studies.rollouts.mismatch import drawn_from_own, in_order_of
from scoremode.studies.rollouts.own_texts import OwnTexts, own_texts
from scoremode.studies.rollouts.parting import Partings, partings
from scoremode.studies.rollouts.speculation import Speculation, acceptances, speculation
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import Floats

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


@dataclass(frozen=True, slots=True)
class OwnWords:
    """What the texts of rollouts say about one reader of a comparison. None: they do not say it."""

    writer: str
    reader: str
    partings: Partings | None  # for greedy texts, if the reader's first choices were measured
    read: OwnTexts | None  # for sampled texts
    drafts: Speculation | None  # if asked for, and if texts are greedy or drawn from the writer's own distribution
    examples: tuple[OtherChoice, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The statistics by subject."""
        found = {"partings": self.partings, "own_texts": self.read, "drafts": self.drafts}
        known = {name: one.statistics() for name, one in found.items() if one is not None}
        examples = [asdict(one) for one in self.examples]
        return {"writer": self.writer, "reader": self.reader, **known, "examples": examples}


@dataclass(frozen=True, slots=True)
class Sides:
    """Who reads texts, and the run of their writer, if it is in the comparison."""

    name: str
    reader: Run
    writer: Run | None

    @staticmethod
    def of(c: Comparison, rollouts: Rollouts) -> Sides:
        """A candidate that reads its own texts would say nothing about the baseline."""
        if is_writer(c.baseline, rollouts):
            return Sides(c.name, c.candidate, c.baseline)
        if is_writer(c.candidate, rollouts):
            return Sides(c.baseline_name, c.baseline, c.candidate)
        return Sides(c.name, c.candidate, None)


def own_words(
    found: Sequence[Comparison], rollouts: Rollouts, count: int | None = None, *, drafts: bool = False
) -> list[OwnWords]:
    """Returns what the texts of rollouts say about each candidate of comparisons on them, or on the first ``count``.

    With ``drafts``, also what each candidate would save as a draft model.
    """
    rollouts = rollouts if count is None else rollouts.first(count)
    writer, sides = str(rollouts.manifest["model"]), [Sides.of(c, rollouts) for c in found]
    if rollouts.manifest["sampling"].get("temperature") == 0:
        parted = [_partings(s, rollouts) for s in sides]
        drafted = [_greedy_drafts(s, rollouts) if drafts else None for s in sides]
        told = [other_choices(s.reader, rollouts, p.noise if p else 0.0) for s, p in zip(sides, parted, strict=True)]
        return [
            OwnWords(writer, s.name, p, None, d, t) for s, p, d, t in zip(sides, parted, drafted, told, strict=True)
        ]
    return [
        OwnWords(writer, s.name, None, *_read(c, s, rollouts, drafts=drafts), other_choices(s.reader, rollouts))
        for c, s in zip(found, sides, strict=True)
    ]


def is_writer(run: Run, rollouts: Rollouts) -> bool:
    """Did the model of a run write these texts?"""
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
    found = dict[int, OtherChoice]()
    for at in np.argsort(-lost, kind="stable")[: np.count_nonzero(lost > -np.inf)].tolist():
        text, target = int(np.searchsorted(starts, at, side="right")) - 1, int(order[at])
        if text in found:
            continue
        earlier = [str(facts.value("text", int(i))) for i in order[max(starts[text], at - BEFORE) : at]]
        found[text] = OtherChoice(
            prompt=int(rollouts.prompt[text]),
            sample=int(rollouts.sample[text]),
            token=at - int(starts[text]) + 1,
            before=(rollouts.prompt_text[text] + joined(earlier))[-BEFORE:],
            written=str(facts.value("text", target)),
            prefers=str(facts.value("top_text", target)),
            p_writer=exp(rollouts.raw_logprob[text][at - int(starts[text])]),
            p_reader=exp(scores.value("logprob", target)),
            p_prefers=exp(scores.value("top_logprob", target)),
            gap=float(gap[target]) if np.isfinite(gap[target]) else None,
        )
        if len(found) == MOST_EXAMPLES:
            break
    return tuple(found.values())


def _partings(sides: Sides, rollouts: Rollouts) -> Partings | None:
    """Finds partings. A gap that the writer itself shows where it reads its own greedy text is noise."""
    reader, writer = sides.reader, sides.writer
    if not reader.scores.has("top"):
        return None
    noise = 0.0
    if writer is not None and writer.scores.has("top"):
        strays = np.asarray(writer.scores.top) != np.asarray(writer.facts.id)
        noise = float(_gaps(writer)[strays].max(initial=0.0))
    order = in_order_of(rollouts, reader)
    facts, top = reader.facts, np.asarray(reader.scores.top)
    columns = (np.asarray(column)[order] for column in (facts.document, facts.group, facts.id, top, _gaps(reader)))
    return partings(*columns, noise=noise)


def _greedy_drafts(sides: Sides, rollouts: Rollouts) -> Speculation | None:
    """Finds what a draft model would save a greedy target: a draft is accepted if it is the text's own token."""
    reader = sides.reader
    if not reader.scores.has("top"):
        return None
    order, facts = in_order_of(rollouts, reader), reader.facts
    same = np.asarray(reader.scores.top) == np.asarray(facts.id)
    return speculation(facts.document[order], facts.group[order], same[order].astype(np.float64))


def _read(c: Comparison, sides: Sides, rollouts: Rollouts, *, drafts: bool) -> tuple[OwnTexts, Speculation | None]:
    order = in_order_of(rollouts, sides.reader)
    document, group = sides.reader.facts.document[order], sides.reader.facts.group[order]
    reader = sides.reader.scores.logprob[order]
    if sides.writer is not None:  # by the same path as the reader
        writer = sides.writer.scores.logprob[in_order_of(rollouts, sides.writer)]
    else:
        writer = np.concatenate(rollouts.raw_logprob)
    read = own_texts(document, group, writer, reader)
    if not drafts or not drawn_from_own(rollouts):
        return read, None
    accept, variation = acceptances(writer, reader), c.divergences.total_variation
    overlap = accept  # its mean over texts of the writer is that of the overlap
    if variation is not None and sides.writer is not None:
        overlap = 1.0 - np.asarray(variation)[in_order_of(rollouts, c.candidate)]
    return read, speculation(document, group, overlap, accept)
