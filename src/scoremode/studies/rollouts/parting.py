"""Where do two models part? For texts that the baseline wrote greedily, as a candidate reads them.

At each token the candidate, fed the baseline's text so far, has a first choice of its own. Where that is another token,
the two models would have gone separate ways. The gap is how much likelier the candidate finds its own choice:

    gap = ln q(first choice) - ln q(the text's token)    nats
    gap ≤ noise    a near-tie: rounding alone may turn it around
    gap > noise    a parting

Survival S(t) is the probability that the first t tokens have no parting. A text that ends without one is censored at
its end (Kaplan-Meier):

    n_u texts that have a token u and no parting before it, d_u of them part there
    S(t) = Π (1 - d_u / n_u) over u ≤ t

The error of ln S(t) is the error of a mean over texts, by estimate.py. Text i, which parts or ends at token e, has the
influence C(min(t, e)) - [it parts at e ≤ t] / (n_e - d_e), with C(t) = Σ d_u / (n_u (n_u - d_u)) over u ≤ t.
Influences of the texts of one prompt are added up before they are squared. If each text has its own prompt, this is
Greenwood's formula times G / (G - 1). Bounds are taken on the scale ln(-ln S), so that they lie between 0 and 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from scoremode.core.scores.answers import measured
from scoremode.core.statistics.estimate import ratio, with_bounds, with_error_fields
from scoremode.core.statistics.groups import FEWEST
from scoremode.core.statistics.statistic import Statistic, computed, plain
from scoremode.errors import RunError
from scoremode.values import Bools, Estimate, Floats, Ids, Ints


@dataclass(frozen=True, eq=False)
class Survival:
    """Texts that part or end: Kaplan-Meier, with errors by group."""

    end: Ints  # (texts,) the token, from 1, at which a text parts, or its last token
    parts: Bools  # (texts,) does it part there?
    group: Ints  # (texts,) texts of one prompt are one group

    @cached_property
    def _steps(self) -> tuple[Floats, Floats, Floats]:
        """At each token from 0 to the last: texts at risk, S, and C of the module's text."""
        size = int(self.end.max(initial=0)) + 1
        parted = np.bincount(self.end[self.parts], minlength=size).astype(np.float64)
        ended = np.bincount(self.end, minlength=size)
        at_risk = len(self.end) - np.concatenate([[0], np.cumsum(ended)[:-1]]).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):  # all texts part: S is 0 from there on; there are none
            survival: Floats = np.cumprod(1 - parted / at_risk, dtype=np.float64)
            return at_risk, survival, np.cumsum(parted / (at_risk * (at_risk - parted)))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest text, as far as it was read."""
        return len(self._steps[0]) - 1

    def at(self, length: int) -> Estimate:
        """Returns S(length). ``n`` counts the texts that were read so far, and ``groups`` their groups.

        It has no bounds where fewer than FEWEST groups are left. If no text has parted, each group counts as one.
        """
        at_risk, survival, influence = self._steps
        if length > self.longest and survival[-1] == 0:  # the last texts parted, and none goes on
            return replace(self.at(self.longest), n=0, groups=0)
        if not 0 <= length <= self.longest:
            return Estimate(math.nan, None, 0, 0)
        groups = len(np.unique(self.group[self.end >= length]))
        estimate = Estimate(float(survival[length]), None, int(at_risk[length]), groups)
        if groups < FEWEST:
            return estimate
        if estimate.value == 1:
            return replace(with_bounds(replace(estimate, stderr=0.0, freedom=groups - 1.0), "share"), freedom=None)
        if estimate.value == 0:
            before = self.at(int(np.flatnonzero(survival > 0)[-1]))
            return replace(estimate, stderr=0.0, low=0.0, high=before.high)
        left_over = at_risk[self.end] - np.bincount(self.end[self.parts], minlength=len(at_risk))[self.end]
        counted = self.parts & (self.end <= length)
        each = influence[np.minimum(self.end, length)]
        each[counted] -= 1 / left_over[counted]
        of_log = ratio(each * len(each), np.ones(len(each)), self.group)
        return _log_log(estimate, of_log)

    def median(self) -> int | None:
        """Returns the first length that at most half of the texts reach without a parting; None if more do."""
        reached = np.flatnonzero(self._steps[1] <= 0.5)
        return int(reached[0]) if len(reached) else None


def _log_log(survival: Estimate, of_log: Estimate) -> Estimate:
    """Returns S with the error that its logarithm has, and with bounds on the scale ln(-ln S)."""
    if of_log.stderr is None:
        return survival
    if of_log.stderr == 0:  # all groups have the same influence: each says yes or no
        return with_bounds(replace(survival, stderr=0.0, freedom=of_log.freedom), "share")
    logarithm = math.log(survival.value)
    around = with_bounds(replace(of_log, value=0.0, stderr=of_log.stderr / -logarithm))
    low, high = (math.exp(logarithm * math.exp(measured(bound))) for bound in (around.high, around.low))
    return replace(survival, stderr=survival.value * of_log.stderr, freedom=of_log.freedom, low=low, high=high)


@dataclass(frozen=True, eq=False)
class Partings:
    """Where a candidate would have left the texts of a baseline."""

    noise: float  # nats: a smaller gap is a near-tie
    text: Ints  # (texts,) the texts that have a target, in order
    groups: Ints  # (texts,)
    length: Ints  # (texts,) tokens of the text
    first_other: Ints  # (texts,) the token, from 1, at which the candidate first has another choice; 0: nowhere
    first_parting: Ints  # (texts,) the same, near-ties not counted
    other_choices: int  # targets at which the candidate has another choice
    near_ties: int  # those of them that are near-ties

    def survival(self, *, near_ties: bool = False) -> Survival:
        """Returns survival against length; with ``near_ties``, these count as partings too."""
        first = self.first_other if near_ties else self.first_parting
        return Survival(np.where(first > 0, first, self.length), first > 0, self.groups)

    def lengths(self) -> list[int]:
        """Returns the lengths at which tables show survival: 16, 32, 64, …, and the longest text.

        If half of the texts part before that: 1, 2, 4, … from their first token on.
        """
        half = self.survival(near_ties=True).median()
        longest, lengths = int(self.length.max(initial=0)), [16 if half is None or half >= 16 else 1]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        return [length for length in lengths if length < longest] + ([longest] if longest else [])

    def statistics(self) -> dict[str, Any]:
        strict, beyond = self.survival(near_ties=True), self.survival()
        each = [(length, beyond.at(length), strict.at(length)) for length in self.lengths()]
        rows = [
            {"length": t, "texts": a.n, **with_error_fields("no_parting", a), **with_error_fields("no_other_choice", b)}
            for t, a, b in each
        ]
        return {**computed(STATISTICS, self), "survival": rows}


STATISTICS = (
    plain("texts", "texts with a target", lambda p: len(p.text)),
    plain("groups", "prompts", lambda p: len(np.unique(p.groups))),
    plain("targets", "tokens of these texts", lambda p: int(p.length.sum())),
    plain("noise", "nats: a smaller gap is a near-tie", lambda p: p.noise),
    plain("other_choices", "tokens at which the candidate has another choice", lambda p: p.other_choices),
    plain("near_ties", "those that are near-ties", lambda p: p.near_ties),
    Statistic("without_parting", "share of texts without a parting", lambda p: p.first_parting == 0, range="share"),
    Statistic("without_other_choice", "the same, near-ties counted", lambda p: p.first_other == 0, range="share"),
    plain("median_parting", "length that half of the texts reach", lambda p: p.survival().median()),
    plain("median_other_choice", "near-ties counted", lambda p: p.survival(near_ties=True).median()),
)


def partings(text: Ints, group: Ints, token: Ids, top: Ids, gap: Floats, *, noise: float = 0.0) -> Partings:
    """Finds where a candidate leaves texts. Arrays have one entry per target, and texts come one after the other.

    ``text`` and ``group`` number the text and its prompt, ``token`` is the text's own token, ``top`` the candidate's
    first choice, and ``gap`` its top_logprob - logprob. A text without a target is not counted.

    >>> found = partings(*np.array([[0, 0, 0], [0, 0, 0], [5, 6, 7], [5, 9, 9]]), np.array([0, 0.01, 0.5]), noise=0.02)
    >>> found.first_other.tolist(), found.first_parting.tolist()
    ([2], [3])
    """
    assert len(text) == len(group) == len(token) == len(top) == len(gap), "one entry per target"
    starts = np.flatnonzero(np.diff(text, prepend=text[:1] - 1))
    assert len(np.unique(text[starts])) == len(starts), "the targets of a text come one after the other"
    if np.isnan(gap).any():
        raise RunError("a gap between two choices is NaN", fix="score again with --fresh")
    length = np.diff(np.append(starts, len(text)))
    place = np.arange(len(text)) - np.repeat(starts, length) + 1
    other = token != top
    near = other & (gap <= noise)

    def first(where: Bools) -> Ints:
        nowhere = np.iinfo(np.int64).max
        places = np.minimum.reduceat(np.where(where, place, nowhere), starts) if len(starts) else starts
        return np.where(places == nowhere, 0, places)

    return Partings(
        noise=noise,
        text=text[starts],
        groups=group[starts],
        length=length,
        first_other=first(other),
        first_parting=first(other & ~near),
        other_choices=int(other.sum()),
        near_ties=int(near.sum()),
    )
