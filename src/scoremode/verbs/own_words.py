"""Comparisons on rollouts: what else their texts say, because a model wrote them.

greedy texts                      where each candidate parts from them; tokens per step if it drafted for their writer
sampled texts                     what each candidate thinks of them; tokens per step if it drafted for their writer
the baseline is not their writer  then the writer's log-probabilities are those of the rollouts
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
    """What the texts of rollouts say about one candidate. None: they do not say it."""

    writer: str
    candidate: str
    partings: Partings | None  # for greedy texts, if the candidate's first choices were measured
    read: OwnTexts | None  # for sampled texts
    drafts: Speculation | None  # for greedy texts, and for those that were drawn from the writer's own distribution

    def as_json(self) -> dict[str, Any]:
        """The statistics by subject."""
        found = {"partings": self.partings, "own_texts": self.read, "drafts": self.drafts}
        return {name: one.statistics() for name, one in found.items() if one is not None}


def own_words(found: Sequence[Comparison], rollouts: Rollouts, count: int | None = None) -> list[OwnWords]:
    """Returns what the texts of rollouts say about each candidate of comparisons on them, or on the first ``count``."""
    rollouts = rollouts if count is None else rollouts.first(count)
    writer = str(rollouts.manifest["model"])
    if rollouts.manifest["sampling"].get("temperature") == 0:
        return [OwnWords(writer, c.name, _partings(c, rollouts), None, _greedy_drafts(c, rollouts)) for c in found]
    return [OwnWords(writer, c.name, None, *_read(c, rollouts)) for c in found]


def is_writer(run: Run, rollouts: Rollouts) -> bool:
    """Did the model of a run write these texts?"""
    return bool(run.manifest.get("model_fingerprint") == rollouts.manifest.get("model_fingerprint"))


def _gaps(run: Run) -> Floats:
    """How much likelier each first choice is than the text's token."""
    return np.asarray(run.scores.top_logprob) - np.asarray(run.scores.logprob)


def _partings(c: Comparison, rollouts: Rollouts) -> Partings | None:
    """Finds partings. A gap that the writer itself shows where it reads its own greedy text is noise."""
    if not c.candidate.scores.has("top"):
        return None
    noise = 0.0
    if is_writer(c.baseline, rollouts) and c.baseline.scores.has("top"):
        strays = np.asarray(c.baseline.scores.top) != np.asarray(c.baseline.facts.id)
        noise = float(_gaps(c.baseline)[strays].max(initial=0.0))
    order = in_order_of(rollouts, c.candidate)
    facts, top = c.candidate.facts, np.asarray(c.candidate.scores.top)
    columns = (np.asarray(column)[order] for column in (facts.document, facts.group, facts.id, top, _gaps(c.candidate)))
    return partings(*columns, noise=noise)


def _greedy_drafts(c: Comparison, rollouts: Rollouts) -> Speculation | None:
    """Finds what a draft model would save a greedy target: a draft is accepted if it is the text's own token."""
    if not c.candidate.scores.has("top"):
        return None
    order, facts = in_order_of(rollouts, c.candidate), c.candidate.facts
    same = np.asarray(c.candidate.scores.top) == np.asarray(facts.id)
    return speculation(facts.document[order], facts.group[order], same[order].astype(np.float64))


def _read(c: Comparison, rollouts: Rollouts) -> tuple[OwnTexts, Speculation | None]:
    order = in_order_of(rollouts, c.candidate)
    document, group = c.candidate.facts.document[order], c.candidate.facts.group[order]
    reader = c.candidate.scores.logprob[order]
    if is_writer(c.baseline, rollouts):  # by the same path as the candidate
        writer = c.baseline.scores.logprob[in_order_of(rollouts, c.baseline)]
    else:
        writer = np.concatenate(rollouts.raw_logprob)
    read = own_texts(document, group, writer, reader)
    if not drawn_from_own(rollouts):
        return read, None
    accept, variation = acceptances(writer, reader), c.divergences.total_variation
    overlap = accept  # its mean over texts of the writer is that of the overlap
    if variation is not None and is_writer(c.baseline, rollouts):
        overlap = 1.0 - np.asarray(variation)[order]
    return read, speculation(document, group, overlap, accept)
