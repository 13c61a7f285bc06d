"""Two runs of one plan ─▶ numbers with errors: paired by target, grouped by what is independent.

Both runs scored the same targets, so the difficulty of the text is in both and cancels in their difference. Every
error here is the error of that difference, never of two separate numbers. Means weight a target as the method does
(``Comparison.weight``); quantiles count each target once. docs/compare-statistics.md has every formula. Bounds
(``…_low``, ``…_high``) are 95 % bounds by Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.errors import RunError
from scoremode.plan.recipes import methods
from scoremode.plan.windows import measured
from scoremode.statistics.estimate import GroupSums, exponential, finite_or_none, ratio, transformed, with_bounds
from scoremode.statistics.groups import distinct
from scoremode.statistics.streams import Blocks, order_statistics
from scoremode.store.run import Run
from scoremode.values import BLOCK, Bools, Estimate, Floats, Ids, Ints, release_read_blocks


@dataclass(frozen=True, eq=False)
class Comparison:
    """A candidate against a baseline, target by target, on one plan.

    Arrays have one line per target, in plan order, like the scores of both runs.
    """

    name: str  # of the candidate, unique among the candidates that are compared together
    baseline: Run
    candidate: Run
    groups: Ints  # (n,) targets of one group are not independent of each other
    weight: Floats  # (n,) how much a target counts in the method's mean: 1 unless windows are averaged
    kl: Floats | None  # (n,) nats, KL(baseline‖candidate) over the whole vocabulary; None between stored runs
    noise_kl: Floats | None  # (m,) KL of the baseline to itself, computed in a different way; None if not measured
    manifest: Mapping[str, Any]  # how it was made: command, engine, model_format, bytes, bits_per_weight, sizes
    path: str | None = None  # the folder it is stored in
    noise_perturbed: str | None = None  # what was computed in a different way for ``noise_kl``, or why it is None

    def statistics(self) -> dict[str, Any]:
        """Perplexities, divergence and shares, with paired errors: see docs/compare-statistics.md."""
        return comparison_statistics(self)


KL_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}

DELTA_P_QUANTILES = {
    "min": 0.0,
    "p001": 0.001,
    "p01": 0.01,
    "p05": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p999": 0.999,
    "max": 1.0,
}


def _error_names(*names: str) -> tuple[str, ...]:
    """The field names of statistics that have an error and bounds."""
    return tuple(name + part for name in names for part in ("", "_stderr", "_low", "_high"))


FIELDS: tuple[str, ...] = (
    *("targets", "groups", "freedom"),
    *_error_names("ppl_baseline", "ppl_candidate"),
    *("bits_per_byte_baseline", "bits_per_byte_candidate"),
    *("zero_probability_baseline", "zero_probability_candidate"),
    *_error_names("ppl_ratio", "log_ppl_ratio", "ppl_difference", "kl_mean"),
    "kl_infinite",
    *(f"kl_{name}" for name in KL_QUANTILES),
    *("noise_floor_kl_mean", "noise_floor_kl_p99"),
    *_error_names("delta_logprob_mean", "delta_p_mean", "delta_p_rms"),
    *(f"delta_p_{name}" for name in DELTA_P_QUANTILES),
    *_error_names("same_top", "worse"),
)
"""Every number of ``comparison_statistics``, in its order; a gate may name any of them."""


def comparison_statistics(c: Comparison) -> dict[str, Any]:
    """Every number of a comparison, flat and ready for JSON: ``name``, then FIELDS.

    None stands for a value that does not exist (KL that was not measured, ``same_top`` of a run without ``top``, the
    error of too few groups, a quantile of no values) and for one that is infinite or undefined (a perplexity with a
    target of probability zero).

    >>> comparison_statistics(comparison)["kl_mean"]   # doctest: +SKIP
    0.0312
    """
    require_sound(c)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # infinities become None
        worse = terms(c, "worse").estimate()
        found = {
            "name": c.name,
            "targets": len(c.groups),
            "groups": worse.groups,
            "freedom": worse.freedom,
            **_of_both_runs(c),
            **_perplexity(c),
            **_divergence(c),
            **_error_fields("delta_logprob_mean", terms(c, "delta_logprob_mean").estimate()),
            **_probability(c),
            **_same_top(c),
            **_error_fields("worse", worse),
        }
    return {name: finite_or_none(value) if isinstance(value, float) else value for name, value in found.items()}


def require_sound(c: Comparison) -> None:
    """Raise RunError if arrays have different lengths or contain NaN."""
    held = {"groups": c.groups, "weight": c.weight, "kl": c.kl, "noise_kl": c.noise_kl}
    parts = {name: (len(array), array_blocks(array)) for name, array in held.items() if array is not None}
    for name, run in (("the baseline", c.baseline), ("the candidate", c.candidate)):
        parts[name] = len(run.scores), (logprob for (logprob,) in run.scores.blocks("logprob"))
    for name, (length, blocks) in parts.items():
        if name != "noise_kl" and length != len(c.groups):
            raise RunError(
                f"{c.name}: {name} has {length} targets instead of {len(c.groups)}", fix="compare runs of one plan"
            )
        if any(np.isnan(block).any() for block in blocks):
            raise RunError(f"{c.name}: {name} contains NaN", fix="score again with --fresh")


def array_blocks(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for number, begin in enumerate(range(0, len(array), BLOCK)):
        yield array[begin : begin + BLOCK]
        release_read_blocks((array,), number)


# ── sums that the statistics are made of ─────────────────────────────────────────────────────────────────────────────
class Terms(GroupSums):
    """A statistic as Σ numerator / Σ denominator, with the sums of each group, from which its error follows.

    >>> parts = Terms(5)
    >>> parts.add(np.arange(5), np.array([1.0, 2.0, 3.0, 4.0, 10.0]), np.ones(5))
    >>> parts.estimate()
    4 ± 1.58
    """

    @property
    def groups(self) -> Ints:
        return np.arange(len(self.numerator))


@dataclass(frozen=True, slots=True, eq=False)
class PairedBlock:
    """Some consecutive targets under both models."""

    base: Floats  # (n,) log-probabilities
    cand: Floats  # (n,)
    base_top: Ids | None  # (n,)
    cand_top: Ids | None  # (n,)
    kl: Floats | None  # (n,)
    weight: Floats  # (n,)
    groups: Ints  # (n,)

    @property
    def delta_p(self) -> Floats:
        found: Floats = np.exp(self.cand) - np.exp(self.base)
        return found


def paired_blocks(c: Comparison) -> Iterator[PairedBlock]:
    """All targets of a comparison in order, without keeping the columns of its runs in memory."""
    sides = (run.scores.blocks("logprob", "top") for run in (c.baseline, c.candidate))
    begin = 0
    for number, ((base, base_top), (cand, cand_top)) in enumerate(zip(*sides, strict=True)):
        here = slice(begin, begin + len(base))
        kl = None if c.kl is None else c.kl[here]
        yield PairedBlock(base, cand, base_top, cand_top, kl, c.weight[here], c.groups[here])
        begin = here.stop
        release_read_blocks((c.kl, c.weight, c.groups), number)


Values = Callable[[PairedBlock], Floats | Bools]


def _kl_of(b: PairedBlock) -> Floats:
    assert b.kl is not None, "KL was not measured"
    return b.kl


MEANS: dict[str, Values] = {
    "ppl_ratio": lambda b: b.base - b.cand,
    "log_ppl_ratio": lambda b: b.base - b.cand,
    "kl_mean": _kl_of,
    "delta_logprob_mean": lambda b: b.cand - b.base,
    "delta_p_mean": lambda b: b.delta_p,
    "same_top": lambda b: measured(b.base_top) == measured(b.cand_top),
    "worse": lambda b: b.cand < b.base,
}
"""The value per target that each statistic is the mean of."""


def terms(c: Comparison, name: str) -> Terms:
    """The terms of a statistic; ``kl_mean`` needs KL, and ``same_top`` needs ``top`` in both runs.

    ``ppl_ratio`` and ``log_ppl_ratio`` have the same terms. Their value is the logarithm of the ratio (Σ of differences
    of nll over Σ of weights). If the method averages documents (``averages_documents``), it is the ratio itself (Σ of
    the documents' perplexities over Σ of the baseline's).
    """
    if name in ("ppl_ratio", "log_ppl_ratio") and averages_documents(c):
        return _document_terms(c)
    return _weighted(c, MEANS[name])


def terms_of_difference(a: Comparison, b: Comparison, name: str) -> Terms:
    """As ``terms``, for the difference of two candidates, paired target by target."""
    if name in ("ppl_ratio", "log_ppl_ratio") and averages_documents(a):
        ours, theirs = _document_terms(a), _document_terms(b)
        ours.numerator -= theirs.numerator
        return ours
    values, numbers = MEANS[name], distinct(array_blocks(a.groups))
    found = Terms(len(numbers))
    for ours_here, theirs_here in zip(paired_blocks(a), paired_blocks(b), strict=True):
        numerator = values(ours_here) * ours_here.weight - values(theirs_here) * theirs_here.weight
        found.add(np.searchsorted(numbers, ours_here.groups), numerator, ours_here.weight)
    return found


def terms_of_distance(c: Comparison) -> Terms:
    """The terms of the signed distance between both perplexities; its value is 0 if they are equal."""
    found = terms(c, "ppl_ratio")
    if averages_documents(c):
        found.numerator -= found.denominator
    return found


def averages_documents(c: Comparison) -> bool:
    """Is the method's perplexity an arithmetic mean over documents of perplexities?"""
    method = methods().found.get(c.baseline.manifest["method"])
    return method is not None and method.average == "document"


def _weighted(c: Comparison, values: Values) -> Terms:
    numbers = distinct(array_blocks(c.groups))  # only groups that occur: an empty one would count as independent
    found = Terms(len(numbers))
    for block in paired_blocks(c):
        found.add(np.searchsorted(numbers, block.groups), values(block) * block.weight, block.weight)
    return found


def _document_terms(c: Comparison) -> Terms:
    """Each document's perplexity under the candidate (numerator) and under the baseline (denominator)."""
    documents = distinct(document for (document,) in c.baseline.facts.blocks("document"))
    base, cand = GroupSums(len(documents)), GroupSums(len(documents))
    for (document,), block in zip(c.baseline.facts.blocks("document"), paired_blocks(c), strict=True):
        index, ones = np.searchsorted(documents, document), np.ones(len(document))
        base.add(index, -block.base, ones)
        cand.add(index, -block.cand, ones)
    found = Terms(len(documents))
    found.add(found.groups, np.exp(cand.numerator / cand.denominator), np.exp(base.numerator / base.denominator))
    return found


def quantile(values: Floats, fraction: float) -> float:
    """Linear interpolation between the two nearest values; infinite only if one of them is; NaN if there are none.

    >>> quantile(np.array([0.0, 1.0, np.inf]), 0.25), quantile(np.array([0.0, 1.0, np.inf]), 0.5)
    (0.5, 1.0)
    """
    return quantiles(lambda: [values], len(values), {"wanted": fraction})["wanted"]


def quantiles(blocks: Blocks, n: int, fractions: Mapping[str, float]) -> dict[str, float]:
    """Several quantiles of n values by name."""
    if not n:
        return dict.fromkeys(fractions, math.nan)
    places = {name: _place(fraction, n) for name, fraction in fractions.items()}
    at = order_statistics(blocks, n, {i for below, above, _ in places.values() for i in (below, above)})
    return {name: _between(at[i], at[j], share) for name, (i, j, share) in places.items()}


def _place(fraction: float, n: int) -> tuple[int, int, float]:
    """The indices of the two nearest values, and the position of the quantile between them (0 … 1)."""
    at = fraction * (n - 1)
    below = math.floor(at)
    return below, min(below + 1, n - 1), at - below


def _between(below: float, above: float, share: float) -> float:
    if share == 0:  # a case of its own, because 0 · ∞ is NaN
        return below
    return below + share * (above - below) if math.isfinite(below) else math.inf


# ── the numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _of_both_runs(c: Comparison) -> dict[str, Any]:
    """Each run's own metrics, averaged as the method does."""
    found: dict[str, Any] = {}
    for side, run in (("baseline", c.baseline), ("candidate", c.candidate)):
        found |= _error_fields(f"ppl_{side}", _stored(run, "perplexity"))
    for side, run in (("baseline", c.baseline), ("candidate", c.candidate)):
        found[f"bits_per_byte_{side}"] = _stored(run, "bits_per_byte").value
    for side, run in (("baseline", c.baseline), ("candidate", c.candidate)):
        found[f"zero_probability_{side}"] = sum(int(np.isneginf(p).sum()) for (p,) in run.scores.blocks("logprob"))
    return found


def _stored(run: Run, name: str) -> Estimate:
    metrics = run.manifest["metrics"]
    return Estimate.from_json(metrics[name]) if name in metrics else Estimate(math.nan, None, 0, 0)


def _perplexity(c: Comparison) -> dict[str, Any]:
    parts = terms(c, "ppl_ratio")
    if averages_documents(c):
        quotient = parts.estimate()
        logarithm = _logarithm(quotient)
        difference = ratio(parts.numerator - parts.denominator, np.ones(len(parts.groups)), parts.groups)
    else:
        logarithm = parts.estimate()
        quotient = exponential(logarithm) if math.isfinite(logarithm.value) else logarithm
        difference = _difference_of_exponentials(c)
    return {
        **_error_fields("ppl_ratio", quotient),
        **_error_fields("log_ppl_ratio", logarithm),
        **_error_fields("ppl_difference", difference),
    }


def _logarithm(e: Estimate) -> Estimate:
    """ln of an estimate."""
    if not (math.isfinite(e.value) and e.value > 0):
        return Estimate(math.nan, None, e.n, e.groups)
    return transformed(e, lambda x: math.log(x) if x > 0 else -math.inf, 1 / e.value)


def _difference_of_exponentials(c: Comparison) -> Estimate:
    """exp(mean nll) of the candidate minus that of the baseline, with the error of its first-order expansion.

    Near the means, exp(a) - exp(b) changes by exp(a)·da - exp(b)·db. That is one number per target, so that what both
    runs share cancels before it is squared.
    """
    cand, base = _weighted(c, lambda b: -b.cand).estimate(), _weighted(c, lambda b: -b.base).estimate()
    ppl_cand, ppl_base = exponential(cand).value, exponential(base).value
    value = ppl_cand - ppl_base
    if not math.isfinite(value):
        return Estimate(math.nan, None, len(c.groups), cand.groups)
    moves = _weighted(c, lambda b: ppl_cand * (-b.cand - cand.value) - ppl_base * (-b.base - base.value))
    around_zero = moves.estimate()
    return with_bounds(Estimate(value, around_zero.stderr, len(c.groups), cand.groups, around_zero.freedom))


def _divergence(c: Comparison) -> dict[str, Any]:
    floor = c.noise_kl
    noise = {
        "noise_floor_kl_mean": float(floor.mean()) if floor is not None and len(floor) else None,
        "noise_floor_kl_p99": quantile(floor, 0.99) if floor is not None else None,
    }
    if c.kl is None:
        return {
            **dict.fromkeys((*_error_names("kl_mean"), "kl_infinite", *(f"kl_{name}" for name in KL_QUANTILES))),
            **noise,
        }
    mean = _error_fields("kl_mean", terms(c, "kl_mean").estimate())
    kl = c.kl
    infinite = {"kl_infinite": sum(int(np.isinf(block).sum()) for block in array_blocks(kl))}
    ordered = quantiles(lambda: array_blocks(kl), len(kl), KL_QUANTILES)
    return {**mean, **infinite, **_named("kl", ordered), **noise}


def _named(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _probability(c: Comparison) -> dict[str, Any]:
    ordered = quantiles(lambda: (block.delta_p for block in paired_blocks(c)), len(c.groups), DELTA_P_QUANTILES)
    return {
        **_error_fields("delta_p_mean", terms(c, "delta_p_mean").estimate()),
        **_error_fields("delta_p_rms", _root(_weighted(c, lambda b: b.delta_p**2).estimate())),
        **_named("delta_p", ordered),
    }


def _same_top(c: Comparison) -> dict[str, Any]:
    if not all(run.scores.has("top") for run in (c.baseline, c.candidate)):
        return dict.fromkeys(_error_names("same_top"))
    return _error_fields("same_top", terms(c, "same_top").estimate())


def _root(square: Estimate) -> Estimate:
    """The square root of an estimate; the error of zero is zero."""
    value = math.sqrt(square.value)
    return transformed(square, lambda x: 0.0 if x < 0 else math.sqrt(x), 1 / (2 * value) if value else 0.0)


def _error_fields(name: str, e: Estimate) -> dict[str, Any]:
    return dict(zip(_error_names(name), (e.value, e.stderr, e.low, e.high), strict=True))
