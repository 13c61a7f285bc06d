"""Comparisons on rollouts: what else their texts say, because a model wrote them.

greedy texts                      where each reader parts from them; tokens per step if it drafted for their writer
sampled texts                     what each reader thinks of them; tokens per step if it drafted for their writer
the reader                        the candidate; if it wrote them itself, the baseline
neither model is their writer     then the writer's log-probabilities are those of the rollouts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.statistics.comparison import Comparison
from scoremode.statistics.own_texts import OwnTexts, own_texts
from scoremode.statistics.parting import Partings, partings
from scoremode.statistics.speculation import Speculation, acceptances, speculation
from scoremode.store.run import Run
from scoremode.text.rollouts import Rollouts
from scoremode.values import Floats
from scoremode.verbs.mismatch import drawn_from_own, in_order_of


@dataclass(frozen=True, slots=True)
class OwnWords:
    """What the texts of rollouts say about one reader of a comparison. None: they do not say it."""

    writer: str
    reader: str
    partings: Partings | None  # for greedy texts, if the reader's first choices were measured
    read: OwnTexts | None  # for sampled texts
    drafts: Speculation | None  # for greedy texts, and for those that were drawn from the writer's own distribution

    def as_json(self) -> dict[str, Any]:
        """The statistics by subject."""
        found = {"partings": self.partings, "own_texts": self.read, "drafts": self.drafts}
        known = {name: one.statistics() for name, one in found.items() if one is not None}
        return {"writer": self.writer, "reader": self.reader, **known}


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


def own_words(found: Sequence[Comparison], rollouts: Rollouts, count: int | None = None) -> list[OwnWords]:
    """Returns what the texts of rollouts say about each candidate of comparisons on them, or on the first ``count``."""
    rollouts = rollouts if count is None else rollouts.first(count)
    writer, sides = str(rollouts.manifest["model"]), [Sides.of(c, rollouts) for c in found]
    if rollouts.manifest["sampling"].get("temperature") == 0:
        return [OwnWords(writer, s.name, _partings(s, rollouts), None, _greedy_drafts(s, rollouts)) for s in sides]
    return [OwnWords(writer, s.name, None, *_read(c, s, rollouts)) for c, s in zip(found, sides, strict=True)]


def is_writer(run: Run, rollouts: Rollouts) -> bool:
    """Did the model of a run write these texts?"""
    return bool(run.manifest.get("model_fingerprint") == rollouts.manifest.get("model_fingerprint"))


def _gaps(run: Run) -> Floats:
    """How much likelier each first choice is than the text's token."""
    return np.asarray(run.scores.top_logprob) - np.asarray(run.scores.logprob)


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


def _read(c: Comparison, sides: Sides, rollouts: Rollouts) -> tuple[OwnTexts, Speculation | None]:
    order = in_order_of(rollouts, sides.reader)
    document, group = sides.reader.facts.document[order], sides.reader.facts.group[order]
    reader = sides.reader.scores.logprob[order]
    if sides.writer is not None:  # by the same path as the reader
        writer = sides.writer.scores.logprob[in_order_of(rollouts, sides.writer)]
    else:
        writer = np.concatenate(rollouts.raw_logprob)
    read = own_texts(document, group, writer, reader)
    if not drawn_from_own(rollouts):
        return read, None
    accept, variation = acceptances(writer, reader), c.divergences.total_variation
    overlap = accept  # its mean over texts of the writer is that of the overlap
    if variation is not None and sides.writer is not None:
        overlap = 1.0 - np.asarray(variation)[in_order_of(rollouts, c.candidate)]
    return read, speculation(document, group, overlap, accept)
