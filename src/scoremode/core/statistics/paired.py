"""Two runs of one plan together: values per target, and their means with paired errors.

Both runs scored the same targets, so the difficulty of the text cancels in their difference. Every error here is the
error of such a difference, never of two separate numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from scoremode.core.plan.recipes import methods
from scoremode.core.scores.answers import measured
from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.estimate import (
    GroupSums,
    beyond,
    exponential,
    perplexities,
    quantiles,
    ratio,
    transformed,
    with_bounds,
)
from scoremode.core.store.run import Run
from scoremode.values import Bools, Estimate, Floats, Ints, Range, change

LOWER = {"min": 0.0, "p001": 0.001, "p01": 0.01, "p05": 0.05, "p10": 0.1, "p25": 0.25}  # quantiles, by name
UPPER = {"p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}


@dataclass(frozen=True, eq=False)
class PairedRuns:
    """A baseline and a candidate, target by target. Arrays have one line per target, in plan order."""

    name: str  # name of the candidate, unique among the candidates that are compared together
    baseline: Run
    candidate: Run
    groups: Ints  # (n,) targets of one group are not independent of each other
    weight: Floats  # (n,) weight of a target in the method's mean: 1 unless windows are averaged
    divergences: Divergences  # of the candidate from the baseline, over the whole vocabulary; none between stored runs
    noise_kl: Floats | None  # (m,) KL of the baseline to itself, computed in a different way; None if not measured
    answer: Bools | None = field(default=None, kw_only=True)  # (n,) targets in the slice "answer"; None: no slices

    @property
    def kl(self) -> Floats | None:
        """KL(baseline‖candidate) of each target, (n,) in nats; None if it was not measured."""
        return self.divergences.kl

    @property
    def averages_documents(self) -> bool:
        """Is the method's perplexity the arithmetic mean of the documents' perplexities?"""
        method = methods().found.get(self.baseline.manifest["method"])
        return method is not None and method.average == "document"

    @property
    def base(self) -> Floats:
        """The log-probabilities of the targets under the baseline, (n,)."""
        return self.baseline.scores.logprob

    @property
    def cand(self) -> Floats:
        """The log-probabilities of the targets under the candidate, (n,)."""
        return self.candidate.scores.logprob

    @cached_property
    def same_first_choice(self) -> Bools | None:
        """Of which targets do both models have the same first choice, (n,)? None if one did not tell it."""
        tops = self.baseline.scores.top, self.candidate.scores.top
        return None if tops[0] is None or tops[1] is None else tops[0] == tops[1]

    @cached_property
    def delta_p(self) -> Floats:
        difference: Floats = np.exp(self.cand) - np.exp(self.base)
        return difference

    @cached_property
    def moved(self) -> Floats:
        """The differences ln q - ln p. A target of probability zero under both models has not moved."""
        return change(self.cand, self.base)

    def document_sums(self) -> GroupSums:
        """Returns each document's perplexity under the candidate (numerator) and under the baseline (denominator)."""
        document = self.baseline.facts.document
        cand, base = (perplexities(logprob, document) for logprob in (self.cand, self.base))
        sums = GroupSums(len(cand))
        with np.errstate(over="ignore", invalid="ignore"):
            sums.add(sums.indices, cand, base)
        return sums


Values = Callable[[PairedRuns], Floats | Bools]
"""A number per target."""


class PairedMeans:
    """Means over all targets of two runs; each is computed once."""

    def __init__(self, runs: PairedRuns) -> None:
        self.runs = runs
        self._sums: dict[Values, GroupSums] = {}

    @cached_property
    def _groups(self) -> tuple[Ints, GroupSums]:
        """The place of each target's group, and the sums of weights; an empty group would count, so there is none."""
        numbers, index = np.unique(self.runs.groups, return_inverse=True)
        weights = GroupSums(len(numbers))
        weights.add(index, self.runs.weight, self.runs.weight)
        return index, weights

    def sums(self, values: Values) -> GroupSums:
        if values not in self._sums:
            index, weights = self._groups
            group_sums = GroupSums(len(weights.indices), shares=weights)
            group_sums.add(index, values(self.runs) * self.runs.weight, None)
            self._sums[values] = group_sums
        return self._sums[values]

    def mean(self, values: Values, within: Range = "any") -> Estimate:
        """Returns the mean of a value per target, with the method's weights."""
        return self.sums(values).estimate(within)

    @cached_property
    def kl_quantiles(self) -> dict[str, float]:
        return quantiles(measured(self.runs.kl), {"median": 0.5, **UPPER})

    @cached_property
    def delta_p_quantiles(self) -> dict[str, float]:
        return quantiles(self.runs.delta_p, {**LOWER, "median": 0.5, **UPPER})

    @cached_property
    def documents(self) -> GroupSums | None:
        """The perplexities of all documents if the method averages them, else None."""
        return self.runs.document_sums() if self.runs.averages_documents else None


# ── perplexities ──────────────────────────────────────────────────────────────────────────────────────────────────────
def nll_added(b: PairedRuns) -> Floats:
    return b.base - b.cand


def nll_of_baseline(b: PairedRuns) -> Floats:
    return -b.base


def nll_of_candidate(b: PairedRuns) -> Floats:
    return -b.cand


def stored_metric(run: Run, name: str) -> Estimate:
    """A metric of one of the two runs, from its manifest; NaN if it has none."""
    metrics = run.manifest["metrics"]
    return Estimate.from_json(metrics[name]) if name in metrics else Estimate(math.nan, None, 0, 0)


def ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is not None:
        return means.documents.estimate("positive")
    logarithm = means.mean(nll_added, "change")
    if math.isfinite(logarithm.value):
        return exponential(logarithm)
    without_bound = math.inf if logarithm.value > 0 else math.nan  # of an infinite baseline there is no ratio
    return Estimate(without_bound, None, logarithm.n, logarithm.groups)


def log_ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is None:
        return means.mean(nll_added, "change")
    e = means.documents.estimate("positive")
    if not (math.isfinite(e.value) and e.value > 0):
        return Estimate(math.nan, None, e.n, e.groups)
    return transformed(e, lambda x: math.log(x) if x > 0 else -math.inf, 1 / e.value)


def ppl_difference(means: PairedMeans) -> Estimate:
    """exp(mean nll) of the candidate minus that of the baseline, with the error of its first-order expansion.

    Near the means, exp(a) - exp(b) changes by exp(a)·da - exp(b)·db. That is one number per target, so that what both
    runs share cancels before it is squared.
    """
    if (documents := means.documents) is not None:
        moved = documents.numerator - documents.denominator
        return ratio(moved, np.ones(len(moved)), documents.indices, "change")
    cand, base = means.mean(nll_of_candidate), means.mean(nll_of_baseline)
    ppl_cand, ppl_base = exponential(cand).value, exponential(base).value
    value = ppl_cand - ppl_base
    if not math.isfinite(value):
        return Estimate(math.nan, None, cand.n, cand.groups)

    def moves(b: PairedRuns) -> Floats:
        return ppl_cand * (-b.cand - cand.value) - ppl_base * (-b.base - base.value)

    around_zero = means.sums(moves)
    e = around_zero.estimate()
    return with_bounds(Estimate(value, e.stderr, cand.n, cand.groups, e.freedom), "change", around_zero.skewness())


def chance_of_no_change(means: PairedMeans) -> float:
    """The two-sided p-value of a perplexity ratio of 1, by the bounds of the ratio; 1 if it has no error."""
    sums, at = (means.sums(nll_added), 0.0) if means.documents is None else (means.documents, 1.0)
    e, skewness = sums.estimate(), sums.skewness()
    if e.stderr is None or e.freedom is None or e.value == at:
        return 1.0
    if e.stderr == 0:
        return 0.0
    away = (e.value - at) / e.stderr
    if means.documents is None:
        return min(1.0, 2 * beyond(abs(away), e.freedom, skewness if away < 0 else -skewness))
    by_log = beyond(abs(math.log(e.value)) * e.value / e.stderr, e.freedom, 0.0)  # bounds of a positive mean
    return min(1.0, 2 * max(by_log, beyond(-away, e.freedom, skewness) if away < 0 else 0.0))
