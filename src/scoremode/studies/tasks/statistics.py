"""Documents of tasks under two models ─▶ accuracy, recovery, flips and shifts with paired errors.

A row is a task, a group of tasks, or all tasks. Its means are Σ_t w_t · (mean over the documents of task t), with
weights that sum to 1. Documents are independent and tasks are fixed, so the variance of a mean is Σ_t w_t² s_t² / n_t.
Both models have the same documents, so only those that flip make recovery uncertain; one more is added, half lost and
half gained, or ten documents without a flip would look certain. docs/tasks.md has every formula, and how often the
bounds contain the true value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from scoremode.core.scores.answers import measured
from scoremode.core.statistics.estimate import LEVEL, with_bounds
from scoremode.core.statistics.groups import FEWEST
from scoremode.core.statistics.statistic import Statistic, computed, fields_of, plain
from scoremode.studies.tasks.logs import TaskDocument
from scoremode.values import Bools, Estimate, Floats, Range

EXTRA = 0.5  # how many documents are added as lost, and as many as gained
COMMON = ("acc", "acc_norm")  # metrics that always have their own fields

Pair = tuple[Floats, Floats]
"""Values of the baseline and of the candidate, one per document."""
WeightedPairs = Sequence[tuple[Pair, float]]
"""Those of the tasks of a row, with their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class PairedTask:
    """The documents of one task under both models. Fields that a task does not have are None."""

    name: str
    metric: str  # the metric of recovery and of flips without a prefix
    metrics: Mapping[str, Pair]  # (n,) by name; larger is better
    gold: Pair | None = None  # (n,) nats, log-probability of the right answer
    margin: Pair | None = None  # (n,) nats, right answer minus the best other answer
    kl: Floats | None = None  # (n,) nats, KL(baseline‖candidate) over the choices
    chosen: Pair | None = None  # (n,) the choice that each model takes, by the metric; None if that is not known
    documents: Sequence[TaskDocument] = ()
    baseline: Sequence[Floats] | None = None  # log-probabilities of each document's choices; None: texts were generated
    candidate: Sequence[Floats] | None = None
    shots: int | None = None  # None: not known
    version: str = ""  # of the task's definition

    @property
    def count(self) -> int:
        return len(self.metrics[self.metric][0])

    @property
    def changed(self) -> Bools | None:
        return None if self.chosen is None else self.chosen[0] != self.chosen[1]


Parts = Sequence[tuple[PairedTask, float]]
"""Tasks of a row, each with its weight; weights sum to 1."""


def row_statistics(name: str, kind: str, parts: Parts) -> dict[str, Any]:
    """Returns every number of one row, flat and ready for JSON: ``name``, ``kind``, ``metric``, then FIELDS.

    A number is None if it does not exist (``acc_norm`` of a task without it) or is undefined (recovery of a baseline
    that has nothing right, a margin with a probability of zero).
    """
    metrics = sorted({task.metric for task, _ in parts})
    return {"name": name, "kind": kind, "metric": " / ".join(metrics), **computed(STATISTICS, parts)}


Of = Callable[[PairedTask], Any]
"""What one task has; None if it does not have it."""


def _over_tasks(name: str, about: str, of: Of, estimate: Callable[[Any], Any], has_error: bool = True) -> Statistic:
    """A number of a row, from something that each of its tasks has, with their weights; None if one does not."""

    def number(parts: Parts) -> Any:
        pairs = [(value, w) for task, w in parts if (value := of(task)) is not None]
        return estimate(pairs) if pairs and len(pairs) == len(parts) else None

    return Statistic(name, about, of=number, has_error=has_error)


def _of_metric(prefix: str, accuracy: str, metric: str | None) -> tuple[Statistic, ...]:
    """The numbers of one metric, or of the main one of each task. Flips need documents that are right or wrong."""

    def pairs(task: PairedTask) -> Pair | None:
        return task.metrics.get(metric or task.metric)

    def flips(task: PairedTask) -> Pair | None:
        pair = pairs(task)
        return pair if pair is not None and all(map(is_binary, pair)) else None

    def counts(weighted_pairs: WeightedPairs) -> list[int]:
        return [sum(int(hits.sum()) for hits, _ in _turned(weighted_pairs, side)) for side in (0, 1)]

    return (
        _over_tasks(f"{accuracy}_baseline", "mean metric of the baseline", pairs, partial(_right, side=0)),
        _over_tasks(f"{accuracy}_candidate", "mean metric of the candidate", pairs, partial(_right, side=1)),
        _over_tasks(f"{accuracy}_difference", "candidate minus baseline", pairs, difference),
        _over_tasks(f"{prefix}recovery", "candidate / baseline", pairs, recovery),
        _over_tasks(f"{prefix}flips", "share that flips", flips, lambda x: share([(a != b, w) for (a, b), w in x])),
        _over_tasks(f"{prefix}lost", "share that turns wrong", flips, lambda x: share(_turned(x, 0))),
        _over_tasks(f"{prefix}gained", "share that turns right", flips, lambda x: share(_turned(x, 1))),
        _over_tasks(f"{prefix}lost_documents", "that turn wrong", flips, lambda x: counts(x)[0], has_error=False),
        _over_tasks(f"{prefix}gained_documents", "that turn right", flips, lambda x: counts(x)[1], has_error=False),
        _over_tasks(f"{prefix}mcnemar", "of so uneven a split", flips, lambda x: mcnemar(*counts(x)), has_error=False),
    )


def _turned(pairs: WeightedPairs, better: int) -> list[tuple[Bools, float]]:
    return [(pair[better] > pair[1 - better], w) for pair, w in pairs]


def _right(pairs: WeightedPairs, side: int) -> Estimate:
    """The mean metric of one model: a share if every document is either right or wrong under both."""
    binary = all(is_binary(values) for pair, _ in pairs for values in pair)
    return share([(pair[side] > 0, w) for pair, w in pairs]) if binary else mean([(p[side], w) for p, w in pairs])


def _shift(pairs: WeightedPairs) -> Estimate:
    return mean([(candidate - baseline, w) for (baseline, candidate), w in pairs])


def is_binary(values: Floats) -> bool:
    """Is every document either right (1) or wrong (0)?"""
    return bool(np.isin(values, (0.0, 1.0)).all())


# ── estimates ────────────────────────────────────────────────────────────────────────────────────────────────────────
def mean(parts: Sequence[tuple[Floats, float]], within: Range = "any") -> Estimate:
    """Returns Σ w · mean over documents, with bounds by Student's t. For one task, lm-eval prints the same error.

    >>> mean([(np.array([1.0, 2.0, 3.0, 4.0, 10.0]), 1.0)])
    4.0 ± 1.6
    """
    value = sum(w * float(values.mean()) for values, w in parts)
    n = sum(len(values) for values, _ in parts)
    if not _enough(parts) or not math.isfinite(value):
        return Estimate(value, None, n, n)
    variances = [w**2 * float(values.var(ddof=1)) / len(values) for values, w in parts]
    total = sum(variances)
    freedom = _freedom(variances, [len(values) for values, _ in parts])
    return with_bounds(Estimate(value, math.sqrt(total), n, n, freedom), within)


def share(parts: Sequence[tuple[Bools, float]]) -> Estimate:
    """Returns a share of documents with the error that lm-eval prints, and Wilson's bounds, which hold near 0 and 1.

    For several tasks, the bounds are those of one task with the number of documents that would give the same error.

    >>> found = share([(np.array([True] * 9 + [False]), 1.0)])
    >>> found, round(found.low, 4), round(found.high, 4)
    (0.90 ± 0.10, 0.5958, 0.9821)
    """
    value = sum(w * float(hits.mean()) for hits, w in parts)
    n = sum(len(hits) for hits, _ in parts)
    if not _enough(parts):
        return Estimate(value, None, n, n)
    shares = [float(hits.mean()) for hits, _ in parts]
    stderr = math.sqrt(sum(w**2 * p * (1 - p) / (len(h) - 1) for (h, w), p in zip(parts, shares, strict=True)))
    spread = sum(w**2 * p * (1 - p) / len(h) for (h, w), p in zip(parts, shares, strict=True))
    alike = 1 / sum(w**2 / len(h) for h, w in parts)  # the number of documents if all tasks had the same share
    size = max(alike, value * (1 - value) / spread) if spread > 0 else alike
    low, high = wilson(value, size)
    return Estimate(value, stderr, n, n, float(n - len(parts)), low, high)


def wilson(value: float, size: float) -> tuple[float, float]:
    """Returns Wilson's score bounds of a share of ``size`` documents."""
    from scipy.special import ndtri

    z = float(ndtri((1 + LEVEL) / 2))
    middle = (value + z**2 / (2 * size)) / (1 + z**2 / size)
    reach = z / (1 + z**2 / size) * math.sqrt(value * (1 - value) / size + z**2 / (4 * size**2))
    return max(0.0, min(value, middle - reach)), min(1.0, max(value, middle + reach))


def recovery(pairs: WeightedPairs) -> Estimate:
    """Returns candidate / baseline with its paired error; NaN if the baseline is 0.

    >>> both, lost = (np.ones(90), np.ones(90)), (np.ones(10), np.zeros(10))
    >>> found = recovery([((np.concatenate([both[0], lost[0]]), np.concatenate([both[1], lost[1]])), 1.0)])
    >>> found, round(found.low, 3), round(found.high, 3)
    (0.900 ± 0.031, 0.84, 0.965)
    """
    n = sum(len(base) for (base, _), _ in pairs)
    below, above = (sum(w * float(pair[i].mean()) for pair, w in pairs) for i in (0, 1))
    if not (math.isfinite(below) and math.isfinite(above) and below > 0):
        return Estimate(math.nan, None, n, n)
    value = above / below
    if not _enough([(base, w) for (base, _), w in pairs]):
        return Estimate(value, None, n, n)
    extended = [_Extended.of(base, cand, w, n) for (base, cand), w in pairs]
    p, q = (sum(part.weight * part.mean[i] for part in extended) for i in (0, 1))
    if not q > 0:
        return Estimate(value, None, n, n)
    bounds = _bounded(extended, math.log(q / p), -1 / p, 1 / q, n)
    low, high = min(value, math.exp(measured(bounds.low))), max(value, math.exp(measured(bounds.high)))
    stderr = measured(bounds.stderr)
    return Estimate(value, value * stderr if value else q / p * stderr, n, n, bounds.freedom, low, high)


def difference(pairs: WeightedPairs) -> Estimate:
    """Returns candidate minus baseline with its paired error."""
    n = sum(len(base) for (base, _), _ in pairs)
    value = sum(w * float((cand - base).mean()) for (base, cand), w in pairs)
    if not _enough([(base, w) for (base, _), w in pairs]) or not math.isfinite(value):
        return Estimate(value, None, n, n)
    extended = [_Extended.of(base, cand, w, n) for (base, cand), w in pairs]
    centre = sum(part.weight * (part.mean[1] - part.mean[0]) for part in extended)
    bounds = _bounded(extended, centre, -1.0, 1.0, n)
    low, high = min(value, measured(bounds.low)), max(value, measured(bounds.high))
    return replace(bounds, value=value, low=low, high=high)


@dataclass(frozen=True, slots=True)
class _Extended:
    """Moments of a task's pairs. If documents are right or wrong, EXTRA lost and EXTRA gained documents are added."""

    weight: float
    size: float  # documents, including the added ones
    mean: tuple[float, float]  # means of the baseline and of the candidate
    square: tuple[float, float, float]  # means of base², base·cand, cand²

    @staticmethod
    def of(base: Floats, cand: Floats, weight: float, documents: int) -> _Extended:
        more = EXTRA * len(base) / documents if is_binary(base) and is_binary(cand) else 0.0
        size = len(base) + 2 * more
        sums = (float((base * base).sum()) + more, float((base * cand).sum()), float((cand * cand).sum()) + more)
        first = ((float(base.sum()) + more) / size, (float(cand.sum()) + more) / size)
        return _Extended(weight, size, first, (sums[0] / size, sums[1] / size, sums[2] / size))

    def variance(self, of_base: float, of_cand: float) -> float:
        """Returns the variance of weight · (mean of of_base · base + of_cand · cand)."""
        bb, bc, cc = self.square
        moment = of_base**2 * bb + 2 * of_base * of_cand * bc + of_cand**2 * cc
        middle = of_base * self.mean[0] + of_cand * self.mean[1]
        return self.weight**2 * max(0.0, moment - middle**2) / (self.size - 1)


def _bounded(extended: Sequence[_Extended], value: float, of_base: float, of_cand: float, n: int) -> Estimate:
    """A value with the error of the sum of of_base · base + of_cand · cand over tasks."""
    variances = [part.variance(of_base, of_cand) for part in extended]
    freedom = _freedom(variances, [part.size for part in extended])
    return with_bounds(Estimate(value, math.sqrt(sum(variances)), n, n, freedom))


def _enough(parts: Sequence[tuple[Any, float]]) -> bool:
    """Are there enough documents for an error? A task with one document has no measurable spread."""
    return sum(len(values) for values, _ in parts) >= FEWEST and all(len(values) > 1 for values, _ in parts)


def _freedom(variances: Sequence[float], sizes: Sequence[float]) -> float:
    """Returns the degrees of freedom of a sum of variances, by Welch and Satterthwaite."""
    total = sum(variances)
    if total == 0:
        return float(sum(sizes)) - len(sizes)
    shares = [v / total for v in variances]  # the squares of the variances may be too small for a float
    return 1 / sum(s**2 / (n - 1) for s, n in zip(shares, sizes, strict=True))


def mcnemar(lost: int, gained: int) -> float:
    """Returns the exact two-sided p: twice the smaller tail of Binomial(lost + gained, 1/2), at most 1.

    >>> mcnemar(6, 0), mcnemar(3, 3)
    (0.03125, 1.0)
    """
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(lost, gained), lost + gained, 0.5)))


STATISTICS = (
    plain("documents", "number of documents", lambda parts: sum(task.count for task, _ in parts)),
    *_of_metric("", "accuracy", None),
    *(statistic for metric in COMMON for statistic in _of_metric(f"{metric}_", metric, metric)),
    _over_tasks("changed", "share with another answer", attrgetter("changed"), share),
    _over_tasks("gold_shift", "change of the right answer's log-probability", attrgetter("gold"), _shift),
    _over_tasks("margin_shift", "change of its lead over the best other", attrgetter("margin"), _shift),
    _over_tasks("kl_choices", "KL over the choices", attrgetter("kl"), lambda parts: mean(parts, "positive")),
)
FIELDS = fields_of(STATISTICS)
"""Every number of ``row_statistics``, in its order; a gate may name any of them."""
