"""Two runs of one plan ─▶ numbers with errors. Each is declared once: how it is computed, called and shown.

Means weight a target as the method does (``PairedRuns.weight``); quantiles count each target once. Bounds (``…_low``,
``…_high``) are 95 % bounds by Student's t. docs/compare-statistics.md has every formula.

To add a statistic, add it to STATISTICS. JSON, gates, tables and the report read the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scoremode.plan.windows import measured
from scoremode.statistics.estimate import exponential, finite_or_none, ratio, transformed, with_bounds
from scoremode.statistics.paired import PairedBlock, PairedMeans, PairedRuns, Values
from scoremode.statistics.streams import quantiles
from scoremode.store.run import Run
from scoremode.values import Estimate, Floats

ERROR_PARTS = ("", "_stderr", "_low", "_high")


@dataclass(frozen=True, slots=True)
class TerminalColumn:
    """A statistic as a column of the table in a terminal."""

    title: str
    digits: int
    with_error: bool = False


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number of a comparison; with an error, it has four fields (value, ``…_stderr``, ``…_low``, ``…_high``).

    ``mean`` is the value per target that it is the mean of, ``of`` computes it from the means of a comparison. It is
    the mean itself unless ``of`` is given.
    """

    name: str
    about: str  # one line, shown where the label alone is not enough
    of: Callable[[PairedMeans], Estimate | float | None] | None = None
    mean: Values | None = None
    has_error: bool = False
    needs: Literal["", "logprob", "kl", "top", "noise"] = ""  # it is None where that was not measured, or is infinite
    better: Literal["low", "high", "one", "none"] = "none"  # which values are better; one: those closer to 1
    ranks: Literal[-1, 0, 1] = 0  # candidates can be ranked by it: 1 if more is better, -1 if less; 0 if they cannot
    by_document: bool = False  # of perplexities: a method may average those of documents, instead of ``mean``
    percent: bool = False  # shown as a percentage
    label: str = ""  # heading in the tables of the report; "": it is not in them
    column: TerminalColumn | None = None
    card: str = ""  # heading in the table of a model card
    chart: tuple[str, str] | None = None  # drawn against size: the name on the switch, and the label of the axis

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.name + part for part in ERROR_PARTS) if self.has_error else (self.name,)

    def compute(self, means: PairedMeans) -> dict[str, Any]:
        """Its fields; None for a value that does not exist, is infinite or is undefined."""
        missing = {"kl": means.runs.kl is None, "top": not means.runs.has_top, "noise": means.runs.noise_kl is None}
        if missing.get(self.needs):
            return dict.fromkeys(self.fields)
        found = means.mean(measured(self.mean)) if self.of is None else self.of(means)
        if not isinstance(found, Estimate):
            return {self.name: found if isinstance(found, int) else finite_or_none(found)}
        values = (found.value, found.stderr, found.low, found.high)
        return dict(zip(self.fields, map(finite_or_none, values), strict=False))


# ── values per target ────────────────────────────────────────────────────────────────────────────────────────────────
def _nll_added(b: PairedBlock) -> Floats:
    return b.base - b.cand


def _nll_of_baseline(b: PairedBlock) -> Floats:
    return -b.base


def _nll_of_candidate(b: PairedBlock) -> Floats:
    return -b.cand


# ── perplexities ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _metric(run: Run, name: str) -> Estimate:
    """A metric of one run, as it is stored with it: averaged as the method does."""
    metrics = run.manifest["metrics"]
    return Estimate.from_json(metrics[name]) if name in metrics else Estimate(math.nan, None, 0, 0)


def _ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is not None:
        return means.documents.estimate()
    logarithm = means.mean(_nll_added)
    return exponential(logarithm) if math.isfinite(logarithm.value) else logarithm


def _log_ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is None:
        return means.mean(_nll_added)
    e = means.documents.estimate()
    if not (math.isfinite(e.value) and e.value > 0):
        return Estimate(math.nan, None, e.n, e.groups)
    return transformed(e, lambda x: math.log(x) if x > 0 else -math.inf, 1 / e.value)


def _ppl_difference(means: PairedMeans) -> Estimate:
    """exp(mean nll) of the candidate minus that of the baseline, with the error of its first-order expansion.

    Near the means, exp(a) - exp(b) changes by exp(a)·da - exp(b)·db. That is one number per target, so that what both
    runs share cancels before it is squared. It takes a second pass over the columns.
    """
    if (documents := means.documents) is not None:
        moved = documents.numerator - documents.denominator
        return ratio(moved, np.ones(len(moved)), documents.indices)
    cand, base = means.mean(_nll_of_candidate), means.mean(_nll_of_baseline)
    ppl_cand, ppl_base = exponential(cand).value, exponential(base).value
    value = ppl_cand - ppl_base
    if not math.isfinite(value):
        return Estimate(math.nan, None, cand.n, cand.groups)

    def moves(b: PairedBlock) -> Floats:
        return ppl_cand * (-b.cand - cand.value) - ppl_base * (-b.base - base.value)

    around_zero = means.mean(moves)
    return with_bounds(Estimate(value, around_zero.stderr, cand.n, cand.groups, around_zero.freedom))


def _square_root(square: Estimate) -> Estimate:
    """The square root of an estimate; the error of zero is zero."""
    value = math.sqrt(square.value)
    return transformed(square, lambda x: 0.0 if x < 0 else math.sqrt(x), 1 / (2 * value) if value else 0.0)


# ── quantiles ────────────────────────────────────────────────────────────────────────────────────────────────────────
KL_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}
DELTA_P_QUANTILES = {
    **{"min": 0.0, "p001": 0.001, "p01": 0.01, "p05": 0.05, "p10": 0.1, "p25": 0.25, "median": 0.5},
    **{"p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0},
}
KL_SHOWN: dict[str, dict[str, Any]] = {
    "median": {"label": "KL median", "about": "half of the tokens moved less", "column": TerminalColumn("median", 5)},
    "p99": {
        **{"label": "KL 99%", "about": "99% of the tokens moved less"},
        **{"column": TerminalColumn("99%", 4), "card": "KL 99 %"},
    },
    "p999": {"label": "KL 99.9%", "about": "99.9% of the tokens moved less"},
    "max": {"label": "KL max", "about": "the token that moved most", "column": TerminalColumn("max", 2)},
}


def _kl_quantiles() -> Iterator[Statistic]:
    for name in KL_QUANTILES:

        def of(means: PairedMeans, name: str = name) -> float:
            return means.quantiles("kl", measured(means.runs.kl), KL_QUANTILES)[name]

        shown = {"about": "a quantile of KL over targets, nats", "better": "low", **KL_SHOWN.get(name, {})}
        yield Statistic(f"kl_{name}", of=of, needs="kl", **shown)


def _delta_p_quantiles() -> Iterator[Statistic]:
    for name in DELTA_P_QUANTILES:

        def of(means: PairedMeans, name: str = name) -> float:
            return means.quantiles("delta_p", measured(means.delta_p), DELTA_P_QUANTILES)[name]

        yield Statistic(f"delta_p_{name}", "a quantile of q - p over targets", of=of)


def _noise_mean(means: PairedMeans) -> float | None:
    floor = measured(means.runs.noise_kl)
    return float(floor.mean()) if len(floor) else None


def _noise_p99(means: PairedMeans) -> float:
    return quantiles(measured(means.runs.noise_kl), {"p99": 0.99})["p99"]


# ── the declarations ─────────────────────────────────────────────────────────────────────────────────────────────────
def _worse(b: PairedBlock) -> Any:
    return b.cand < b.base


def _squared_delta_p(b: PairedBlock) -> Floats:
    return b.delta_p**2


STATISTICS: tuple[Statistic, ...] = (
    Statistic("targets", "number of targets", of=lambda means: len(means.runs.groups)),
    Statistic("groups", "number of groups of targets", of=lambda means: means.mean(_worse).groups),
    Statistic(
        "freedom",
        "degrees of freedom of the bounds, for numbers that count each target once",
        of=lambda means: means.mean(_worse).freedom,
    ),
    Statistic(
        "ppl_baseline",
        "the baseline's perplexity",
        of=lambda means: _metric(means.runs.baseline, "perplexity"),
        has_error=True,
        needs="logprob",
    ),
    Statistic(
        "ppl_candidate",
        "exponential of the mean surprise",
        of=lambda means: _metric(means.runs.candidate, "perplexity"),
        has_error=True,
        needs="logprob",
        label="Perplexity",
        column=TerminalColumn("ppl", 4),
        card="perplexity",
    ),
    Statistic(
        "zero_probability_baseline",
        "targets to which the baseline gives probability zero",
        of=lambda means: means.zeros[0],
    ),
    Statistic(
        "zero_probability_candidate",
        "targets to which the candidate gives probability zero",
        of=lambda means: means.zeros[1],
    ),
    Statistic(
        "ppl_ratio",
        "perplexity divided by the baseline's",
        of=_ppl_ratio,
        mean=_nll_added,
        by_document=True,
        has_error=True,
        needs="logprob",
        better="one",
        ranks=-1,
        label="PPL ratio",
        column=TerminalColumn("ratio", 4, with_error=True),
        card="ratio",
        chart=("Perplexity ratio", "perplexity ratio"),
    ),
    Statistic(
        "log_ppl_ratio",
        "logarithm of the perplexity ratio",
        of=_log_ppl_ratio,
        mean=_nll_added,
        by_document=True,
        has_error=True,
        needs="logprob",
        ranks=-1,
    ),
    Statistic(
        "ppl_difference",
        "perplexity minus the baseline's",
        of=_ppl_difference,
        has_error=True,
        needs="logprob",
    ),
    Statistic(
        "kl_mean",
        "mean KL(baseline‖candidate), nats per token",
        mean=lambda b: measured(b.kl),
        has_error=True,
        needs="kl",
        better="low",
        ranks=-1,
        label="KL mean",
        column=TerminalColumn("KL mean", 5, with_error=True),
        card="KL mean (nats)",
        chart=("KL", "mean KL, nats per token"),
    ),
    Statistic("kl_infinite", "targets with infinite KL", of=lambda means: means.infinite, needs="kl"),
    *_kl_quantiles(),
    Statistic("noise_floor_kl_mean", "mean KL of the baseline against itself", of=_noise_mean, needs="noise"),
    Statistic("noise_floor_kl_p99", "99 % quantile of that KL", of=_noise_p99, needs="noise"),
    Statistic(
        "delta_logprob_mean",
        "mean of ln q - ln p",
        mean=lambda b: b.cand - b.base,
        has_error=True,
        needs="logprob",
        ranks=1,
    ),
    Statistic("delta_p_mean", "mean of q - p", mean=lambda b: b.delta_p, has_error=True, ranks=1),
    Statistic(
        "delta_p_rms",
        "root mean square change in the probability of the text's own token",
        of=lambda means: _square_root(means.mean(_squared_delta_p)),
        mean=_squared_delta_p,
        has_error=True,
        better="low",
        percent=True,
        label="Δp RMS",
    ),
    *_delta_p_quantiles(),
    Statistic(
        "same_top",
        "share of tokens with the same first choice",
        mean=lambda b: measured(b.base_top) == measured(b.cand_top),
        has_error=True,
        needs="top",
        better="high",
        ranks=1,
        percent=True,
        label="Same top",
        column=TerminalColumn("same top", 2),
        card="same top",
        chart=("Same top", "same first choice, % of tokens"),
    ),
    Statistic(
        "worse",
        "share of the text's tokens that became less likely",
        mean=_worse,
        has_error=True,
        ranks=-1,
        percent=True,
        label="Worse",
    ),
    Statistic(
        "bits_per_byte_baseline",
        "bits per byte of the text under the baseline",
        of=lambda means: _metric(means.runs.baseline, "bits_per_byte").value,
        needs="logprob",
    ),
    Statistic(
        "bits_per_byte_candidate",
        "bits per byte of the text",
        of=lambda means: _metric(means.runs.candidate, "bits_per_byte").value,
        needs="logprob",
        label="Bits/byte",
    ),
)
"""Every number of a comparison, in the order in which they are listed and shown."""

BY_NAME = {statistic.name: statistic for statistic in STATISTICS}
BY_FIELD = {field: statistic for statistic in STATISTICS for field in statistic.fields}
FIELDS = tuple(BY_FIELD)
"""Every field of ``comparison_statistics``, in its order; a gate may name any of them."""


# ── a comparison ─────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, eq=False)
class Comparison(PairedRuns):
    """A candidate against a baseline, target by target, on one plan."""

    manifest: Mapping[str, Any]  # how it was made: command, engine, model_format, bytes, bits_per_weight, sizes
    path: str | None = None  # the folder it is stored in
    noise_perturbed: str | None = None  # what was computed in a different way for ``noise_kl``, or why it is None

    def statistics(self) -> dict[str, Any]:
        """Perplexities, divergence and shares, with paired errors: see docs/compare-statistics.md."""
        return comparison_statistics(self)


def comparison_statistics(c: Comparison) -> dict[str, Any]:
    """Every number of a comparison, flat and ready for JSON: ``name``, then FIELDS.

    None stands for a value that does not exist (KL that was not measured, ``same_top`` of a run without ``top``, the
    error of too few groups, a quantile of no values) and for one that is infinite or undefined (a perplexity with a
    target of probability zero).

    >>> comparison_statistics(comparison)["kl_mean"]   # doctest: +SKIP
    0.0312
    """
    means = PairedMeans(c)
    has = {"kl": c.kl is not None, "top": c.has_top}
    wanted = [s.mean for s in STATISTICS if s.mean is not None and has.get(s.needs, True)]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # infinities become None
        means.gather_columns([*wanted, _nll_of_baseline, _nll_of_candidate])
        return {"name": c.name, **{name: value for s in STATISTICS for name, value in s.compute(means).items()}}
