"""Two runs of one plan ─▶ numbers with errors. Each is declared once: how it is computed, called and shown.

Means weight a target as the method does (``PairedRuns.weight``); quantiles count each target once. Bounds (``…_low``,
``…_high``) are 95 % bounds in the statistic's range. docs/statistics.md has every formula.

To add a statistic, add it to ComparisonNumbers.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from scoremode.core.plan.path import PREFILL
from scoremode.core.scores.answers import measured
from scoremode.core.scores.frames import ArrowTable, few_lines
from scoremode.core.scores.parquet import RunRows, pair_to_arrow
from scoremode.core.scores.schema import DIVERGENCE, KL
from scoremode.core.statistics.depth import DepthMeans, by_depth
from scoremode.core.statistics.equivalence import Equivalence, answer_change, answer_logprob, equivalence
from scoremode.core.statistics.estimate import LEVEL, quantiles, square_root
from scoremode.core.statistics.paired import (
    LOWER,
    UPPER,
    PairedMeans,
    PairedRuns,
    Values,
    log_ppl_ratio,
    nll_added,
    ppl_difference,
    ppl_ratio,
    stored_metric,
)
from scoremode.core.statistics.parts import SliceMeans, by_slice
from scoremode.core.statistics.statistic import Number, PlainStatistic, Statistic, TerminalColumn, fields_from, plain
from scoremode.core.typed import typed
from scoremode.values import Estimate, Floats, rounded


def needs_whole_divergence(names: Iterable[str]) -> bool:
    """Does one of these statistics need more of a divergence than KL?"""
    others = {column.name for column in DIVERGENCE} - {KL.name}
    return any(name in BY_FIELD and BY_FIELD[name].needs in others for name in names)


def _missing(runs: PairedRuns) -> set[str]:
    """What a statistic may need and was not measured."""
    top, noise = runs.same_first_choice is not None, runs.noise_kl is not None
    measurements = {*runs.divergences.measured, *["top"] * top, *["noise"] * noise}
    return {*(column.name for column in DIVERGENCE), "top", "noise"} - measurements


_plain = partial(plain, "")  # an attribute gives it its name


def _kl_quantile(name: str, about: str = "a quantile of KL over targets, nats", **shown: Any) -> PlainStatistic:
    return _plain(about, lambda means: means.kl_quantiles[name], needs="kl", better="low", **shown)


def _delta_p_quantile(name: str) -> PlainStatistic:
    return _plain("a quantile of q - p over targets", lambda means: means.delta_p_quantiles[name])


def _holding_half(sums: Floats) -> int | None:
    """How many of the largest sums make up half of the total; None if that is infinite or 0."""
    if not np.isfinite(sums).all() or not sums.any():
        return None
    return int(np.searchsorted(np.cumsum(np.sort(sums)[::-1]), sums.sum() / 2)) + 1


def _zeros(logprob: Floats) -> int:
    return int(np.isneginf(logprob).sum())


def _noise_mean(means: PairedMeans) -> float | None:
    floor = measured(means.runs.noise_kl)
    return float(floor.mean()) if len(floor) else None


# ── the declarations ─────────────────────────────────────────────────────────────────────────────────────────────────
def _worse(b: PairedRuns) -> Any:
    return b.cand < b.base


def _squared_delta_p(b: PairedRuns) -> Floats:
    return b.delta_p**2


def _squared_move(b: PairedRuns) -> Floats:
    return b.moved**2


def _named(about: str, needs: str, title: str, mean: Values | None = None, **more: Any) -> Statistic:
    """A statistic of a column of a divergence, which tables show by name; the mean of the column if not of ``mean``."""
    mean = mean or (lambda b: measured(getattr(b.divergences, needs)))
    return Statistic(
        about=about, mean=mean, needs=needs, ranks=-1 if more["better"] == "low" else 1, title=title, **more
    )


def _same_first(count: int) -> Statistic:
    """The share of tokens whose first ``count`` choices are the same. With one choice, it is ``same_top``."""
    about, shown = f"share of tokens with the same first {count} choices", {"better": "high", "percent": True}
    mean: Values = lambda b: measured(b.divergences.same_first) >= count  # noqa: E731
    return _named(about, "same_first", f"same top {count}", mean, range="share", **shown)


_OVERLAP: Values = lambda b: 1.0 - measured(b.divergences.total_variation)  # noqa: E731


class ComparisonNumbers:
    """The numbers of a comparison, each an attribute: ``c.kl_mean`` is an ``Estimate``, ``c.kl_max`` a float."""

    ppl_baseline = Statistic(
        about="the baseline's perplexity",
        of=lambda means: stored_metric(means.runs.baseline, "perplexity"),
        needs="logprob",
    )
    ppl_candidate = Statistic(
        about="exponential of the mean surprise",
        of=lambda means: stored_metric(means.runs.candidate, "perplexity"),
        needs="logprob",
        label="Perplexity",
        column=TerminalColumn("ppl"),
        card="perplexity",
    )
    bits_per_byte_baseline = _plain(
        "bits per byte of the text under the baseline",
        lambda means: stored_metric(means.runs.baseline, "bits_per_byte").value,
        needs="logprob",
    )
    bits_per_byte_candidate = _plain(
        "bits per byte of the text",
        lambda means: stored_metric(means.runs.candidate, "bits_per_byte").value,
        needs="logprob",
        label="Bits/byte",
    )
    zero_probability_baseline = _plain(
        "targets that the baseline thinks impossible", lambda means: _zeros(means.runs.base)
    )
    zero_probability_candidate = _plain(
        "targets that the candidate thinks impossible", lambda means: _zeros(means.runs.cand)
    )
    ppl_ratio = Statistic(
        about="perplexity divided by the baseline's",
        mean=nll_added,
        of=ppl_ratio,
        by_document=True,
        needs="logprob",
        ranks=-1,
        better="one",
        label="PPL ratio",
        column=TerminalColumn("ratio"),
        card="ratio",
        choice="Perplexity ratio",
        axis="perplexity ratio",
    )
    log_ppl_ratio = Statistic(
        about="logarithm of the perplexity ratio",
        mean=nll_added,
        of=log_ppl_ratio,
        by_document=True,
        needs="logprob",
        ranks=-1,
    )
    ppl_difference = Statistic(about="perplexity minus the baseline's", of=ppl_difference, needs="logprob")
    kl_mean = Statistic(
        about="mean KL(baseline‖candidate), nats per token",
        mean=lambda b: measured(b.kl),
        range="positive",
        needs="kl",
        ranks=-1,
        better="low",
        label="KL mean",
        column=TerminalColumn("KL mean"),
        card="KL mean (nats)",
        choice="KL",
        axis="mean KL, nats per token",
    )
    kl_infinite = _plain("targets with infinite KL", lambda means: int(np.isinf(means.runs.kl).sum()), needs="kl")
    kl_median = _kl_quantile(
        "median", "half of the tokens moved less", label="KL median", column=TerminalColumn("KL median", 3)
    )
    kl_p90 = _kl_quantile("p90")
    kl_p95 = _kl_quantile("p95")
    kl_p99 = _kl_quantile(
        "p99", "99% of the tokens moved less", label="KL 99%", column=TerminalColumn("KL 99%", 2), card="KL 99 %"
    )
    kl_p999 = _kl_quantile("p999", "99.9% of the tokens moved less", label="KL 99.9%")
    kl_max = _kl_quantile("max", "the token that moved most", label="KL max", column=TerminalColumn("KL max", 4))
    kl_reverse_mean = _named(
        "mean KL(candidate‖baseline), nats", "kl_reverse", "KL reverse", range="positive", better="low"
    )
    total_variation_mean = _named("mean of half of Σ |p - q|", "total_variation", "TV", range="share", better="low")
    overlap = _named(
        "mean of Σ min(p, q)", "total_variation", "overlap", _OVERLAP, range="share", better="high", percent=True
    )
    noise_floor_kl_mean = _plain("mean KL of the baseline against itself", _noise_mean, needs="noise")
    noise_floor_kl_p99 = _plain(
        "99 % quantile of that KL",
        lambda means: quantiles(measured(means.runs.noise_kl), {"p99": 0.99})["p99"],
        needs="noise",
    )
    delta_logprob_mean = Statistic(
        about="mean of ln q - ln p", mean=lambda b: b.cand - b.base, range="change", needs="logprob", ranks=1
    )
    answer_logprob = Statistic(
        about="mean of ln q - ln p over the slice answer; over all targets of a text without slices",
        mean=answer_change,
        of=answer_logprob,
        needs="logprob",
        better="high",
    )
    delta_logprob_rms = Statistic(
        about="root mean square of ln q - ln p",
        mean=_squared_move,
        of=lambda means: square_root(means.mean(_squared_move, "positive")),
        needs="logprob",
        better="low",
    )
    delta_logprob_max = _plain(
        "the largest |ln q - ln p|",
        lambda means: float(np.abs(means.runs.moved).max()) if len(means.runs.moved) else None,
        better="low",
    )
    delta_p_mean = Statistic(about="mean of q - p", mean=lambda b: b.delta_p, range="change", ranks=1)
    delta_p_rms = Statistic(
        about="root mean square change in the probability of the text's own token",
        mean=_squared_delta_p,
        of=lambda means: square_root(means.mean(_squared_delta_p, "positive")),
        better="low",
        percent=True,
        label="Δp RMS",
    )
    delta_p_min, delta_p_p001, delta_p_p01, delta_p_p05, delta_p_p10, delta_p_p25 = map(_delta_p_quantile, LOWER)
    delta_p_median = _delta_p_quantile("median")
    delta_p_p75, delta_p_p90, delta_p_p95, delta_p_p99, delta_p_p999, delta_p_max = map(_delta_p_quantile, UPPER)
    same_top = Statistic(
        about="share of tokens with the same first choice",
        mean=lambda b: measured(b.same_first_choice),
        range="share",
        needs="top",
        ranks=1,
        better="high",
        percent=True,
        label="Same top",
        column=TerminalColumn("same top"),
        card="same top",
        choice="Same top",
        axis="same first choice, % of tokens",
    )
    top2_same, top3_same, top4_same, top5_same = map(_same_first, (2, 3, 4, 5))
    worse = Statistic(
        about="share of the text's tokens that became less likely",
        mean=_worse,
        range="share",
        ranks=-1,
        percent=True,
        label="Worse",
    )


STATISTICS: tuple[Statistic, ...] = (
    plain("targets", "number of targets", lambda means: len(means.runs.groups)),
    plain("groups", "number of groups of targets", lambda means: means.mean(_worse).groups),
    plain(
        "groups_effective",
        "how many groups of equal size would tell as much",
        lambda means: means.sums(_worse).effective or None,
    ),
    plain(
        "kl_half_groups",
        "how many groups hold half of the KL",
        lambda means: _holding_half(means.sums(lambda b: measured(b.kl)).numerator),
        needs="kl",
    ),
    plain(
        "unseen_share",
        "a kind of text with this share or less may be missing among the groups, with 95 %",
        lambda means: 1 - (1 - LEVEL) ** (1 / groups) if (groups := means.mean(_worse).groups) else None,
    ),
    plain(
        "freedom",
        "degrees of freedom of the bounds, for numbers that count each target once",
        lambda means: means.mean(_worse).freedom,
    ),
    *(statistic for statistic in vars(ComparisonNumbers).values() if isinstance(statistic, Statistic)),
)
"""Every number of a comparison, in the order in which JSON lists them."""

IN_REPR = ("ppl_ratio", "kl_mean", "kl_p99", "same_top")

TOLD = ("engine", "model_format", "bytes", "bits_per_weight")
"""Fields of a comparison's manifest that its row in a table has."""

TEXTS = ("baseline", "engine", "model_format")

BY_NAME = {statistic.name: statistic for statistic in STATISTICS}
BY_FIELD = {field: statistic for statistic in STATISTICS for field in statistic.fields}
FIELDS = tuple(BY_FIELD)
"""Every field of ``Comparison.statistics``, in its order; a gate may name any of them."""


# ── a comparison ─────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, eq=False)
class Comparison(PairedRuns, ArrowTable, ComparisonNumbers):
    """A candidate against a baseline, target by target, on one plan.

    As a table, it has one row per target: ``logprob_baseline``, ``logprob_candidate``, and so on, and ``kl``.
    """

    manifest: Mapping[str, Any]  # how it was made: command, engine, model_format, bytes, bits_per_weight, sizes
    path: str | None = None  # the folder it is stored in
    noise_perturbed: str | None = None  # what was computed in a different way for ``noise_kl``, or why it is None
    few_documents: bool = False  # claim things about other texts of fewer than ten effective documents, too

    @property
    def is_of_paths(self) -> bool:
        """Is a model compared with itself, fed in two ways?"""
        return "rerun" in self.manifest

    @property
    def baseline_name(self) -> str:
        """The name of the baseline's row in a table."""
        return PREFILL if self.is_of_paths else str(self.baseline.manifest["model"])

    def statistics(self) -> dict[str, Any]:
        """Perplexities, divergences and shares with paired errors, as one flat dict for JSON: see docs/statistics.md.

        None: a value that does not exist (KL that was not measured, ``same_top`` of a run without ``top``, the error of
        too few groups, a quantile of no values), or one that is infinite or undefined (a perplexity with a target of
        probability zero).

        >>> sm.compare("ref/", "org/model-4bit")[0].statistics()["kl_mean"]   # doctest: +SKIP
        0.0312
        """
        return dict(self._statistics)

    @cached_property
    def _statistics(self) -> dict[str, Any]:
        return {"name": self.name, **fields_from(STATISTICS, self.estimates)}

    @cached_property
    def estimates(self) -> dict[str, Number]:
        """The numbers by name, as attributes have them; None: not measured, or not known."""
        means = PairedMeans(self)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # infinities become None in JSON
            return {s.name: _between_runs(s, means) for s in STATISTICS}

    def by_depth(self) -> list[DepthMeans]:
        """Means of KL and of the difference of logprobs by depth in the window, with errors."""
        return by_depth(self)

    def by_slice(self) -> list[SliceMeans]:
        """Means of KL, of the difference of logprobs and of equal first choices in each slice of the text."""
        return self._by_slice

    @cached_property
    def _by_slice(self) -> list[SliceMeans]:
        return by_slice(self)

    @typed
    def no_worse_than(self, margin: float) -> Equivalence:
        """Is the candidate no worse than ``margin`` nats per token on texts known to be right, with 95 %?"""
        return equivalence(self, margin, few_documents=self.few_documents)

    def to_arrow(self) -> Any:
        """Every column of both runs, one row per target, as a ``pyarrow.Table``."""
        base, cand = (RunRows(run.scores, run.facts, self.divergences) for run in (self.baseline, self.candidate))
        return pair_to_arrow(base, cand)

    def __repr__(self) -> str:
        """Shows the main numbers."""
        base, cand = self.baseline.manifest, self.candidate.manifest
        either = [Estimate.from_json(m["metrics"]["perplexity"]) for m in (cand, base)]
        return few_lines(
            f"Comparison of {self.name} with {base.get('model')}",
            f"perplexity {either[0]}, the baseline's {either[1]}",
            self._numbers(),
            f"{len(self.groups):,} targets by {base.get('method')} on {base.get('corpus')}",
        )

    def _numbers(self) -> str:
        """The numbers that a person looks at first, in one line."""
        parts = []
        for name in IN_REPR:
            value, stderr = self._statistics[name], self._statistics.get(f"{name}_stderr")
            if value is not None:
                text = " ".join(rounded(value, stderr, percent=BY_NAME[name].percent)).rstrip()
                parts.append(f"{name.replace('_', ' ')} {text}")
        return ", ".join(parts)


class Comparisons(UserList[Comparison], ArrowTable):
    """The comparisons of candidates with one baseline: used like a list, and shown by a notebook as one table.

    As a table, it has one row per candidate, with the statistics of docs/statistics.md.
    """

    def to_arrow(self) -> Any:
        """The statistics of every comparison, one row per candidate, as a ``pyarrow.Table``."""
        import pyarrow as pa

        rows = []
        for c in self:
            numbers, told = c.statistics(), {key: c.manifest.get(key) for key in TOLD}
            rows.append({"name": numbers.pop("name"), "baseline": c.baseline.manifest.get("model"), **told, **numbers})
        table = pa.Table.from_pylist(rows)
        unknown = {f.name: pa.string() if f.name in TEXTS else pa.float64() for f in table.schema}
        fields = [f.with_type(unknown[f.name]) if pa.types.is_null(f.type) else f for f in table.schema]
        return table.cast(pa.schema(fields))

    def __repr__(self) -> str:
        """Shows the main numbers of the first candidates."""
        shown = self if len(self) <= 4 else self[:3]
        lines = [f"{c.name}: {c._numbers()}" for c in shown]
        more = f"and {len(self) - len(shown)} more" if len(shown) < len(self) else ""
        baseline = self[0].baseline.manifest.get("model") if self else None
        return few_lines(f"{len(self)} compared with {baseline}" if self else "no comparison", *lines, more)


def are_of_paths(comparisons: Sequence[Comparison]) -> bool:
    """Is one model compared with itself, fed in several ways?"""
    return bool(comparisons) and all(c.is_of_paths for c in comparisons)


def _between_runs(s: Statistic, means: PairedMeans) -> Number:
    if s.needs in _missing(means.runs):
        return None
    return means.mean(measured(s.mean), s.range) if s.of is None else s.of(means)
