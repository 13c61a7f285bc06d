"""Perplexities of two runs of one plan: their ratio and their difference, with the errors of paired targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from scoremode.core.statistics.estimate import exponential, ratio, transformed, with_bounds
from scoremode.core.statistics.paired import PairedBlock, PairedMeans
from scoremode.core.store.run import Run
from scoremode.values import Estimate, Floats


def nll_added(b: PairedBlock) -> Floats:
    return b.base - b.cand


def nll_of_baseline(b: PairedBlock) -> Floats:
    return -b.base


def nll_of_candidate(b: PairedBlock) -> Floats:
    return -b.cand


def stored_metric(side: Literal["baseline", "candidate"], name: str) -> Callable[[PairedMeans], Estimate]:
    """Returns a function that reads a metric from the manifest of the baseline or the candidate."""

    def of(means: PairedMeans) -> Estimate:
        run: Run = getattr(means.runs, side)
        metrics = run.manifest["metrics"]
        return Estimate.from_json(metrics[name]) if name in metrics else Estimate(math.nan, None, 0, 0)

    return of


def ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is not None:
        return means.documents.estimate("positive")
    logarithm = means.mean(nll_added)
    if math.isfinite(logarithm.value):
        return exponential(logarithm)
    without_bound = math.inf if logarithm.value > 0 else math.nan  # of an infinite baseline there is no ratio
    return Estimate(without_bound, None, logarithm.n, logarithm.groups)


def log_ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is None:
        return means.mean(nll_added)
    e = means.documents.estimate("positive")
    if not (math.isfinite(e.value) and e.value > 0):
        return Estimate(math.nan, None, e.n, e.groups)
    return transformed(e, lambda x: math.log(x) if x > 0 else -math.inf, 1 / e.value)


def ppl_difference(means: PairedMeans) -> Estimate:
    """exp(mean nll) of the candidate minus that of the baseline, with the error of its first-order expansion.

    Near the means, exp(a) - exp(b) changes by exp(a)·da - exp(b)·db. That is one number per target, so that what both
    runs share cancels before it is squared. It takes a second pass over the columns.
    """
    if (documents := means.documents) is not None:
        moved = documents.numerator - documents.denominator
        return ratio(moved, np.ones(len(moved)), documents.indices)
    cand, base = means.mean(nll_of_candidate), means.mean(nll_of_baseline)
    ppl_cand, ppl_base = exponential(cand).value, exponential(base).value
    value = ppl_cand - ppl_base
    if not math.isfinite(value):
        return Estimate(math.nan, None, cand.n, cand.groups)

    def moves(b: PairedBlock) -> Floats:
        return ppl_cand * (-b.cand - cand.value) - ppl_base * (-b.base - base.value)

    around_zero = means.mean(moves)
    return with_bounds(Estimate(value, around_zero.stderr, cand.n, cand.groups, around_zero.freedom))
