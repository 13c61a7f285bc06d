"""Statistics of a comparison, against hand computation, resampling, simulation, and llama.cpp's formulas."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import logit

from scoremode.core.scores.answers import measured
from scoremode.core.scores.columns import Divergences, Scores, TargetFacts
from scoremode.core.statistics.comparison import FIELDS, STATISTICS, Comparison
from scoremode.core.store.run import Run
from scoremode.values import Estimate, Floats, rounded


def make_run(
    logprob: Any,
    *,
    top: Any = None,
    document: Any = None,
    weight: Any = None,
    method: str = "sliding-once",
    **more: Any,
) -> Run:
    """A run whose manifest has the metrics that the method gives for these scores."""
    lp = np.asarray(logprob, np.float64)
    n = len(lp)
    zeros, doc = np.zeros(n, np.int64), np.zeros(n, np.int64) if document is None else np.asarray(document)
    ids = zeros.astype(np.int32)
    scores = Scores(lp, zeros + 1, np.zeros(n), ids if top is None else np.asarray(top, np.int32), np.zeros(n))
    text = np.array(["a"] * n, dtype=object)
    w = np.ones(n) if weight is None else np.asarray(weight, np.float64)
    facts = TargetFacts(zeros, doc, np.arange(n), ids, ids + 1, ids, doc, w, text, text)
    if not n:
        ppl = math.nan
    elif method == "mean-of-texts":
        ppl = float(np.mean([math.exp(-lp[doc == d].mean()) for d in np.unique(doc)]))
    else:
        ppl = float(np.exp(-(lp @ w) / w.sum()))
    error = {"stderr": 0.25, "freedom": 5.0, "low": ppl - 0.6, "high": ppl + 0.6} if math.isfinite(ppl) else {}
    none = {"stderr": None, "freedom": None, "low": None, "high": None}
    known = {"value": ppl if math.isfinite(ppl) else None, "n": n, "groups": 6, **none, **error}
    per_byte = {**known, "value": 0.5}
    manifest = {
        "metrics": {"perplexity": known, "bits_per_byte": per_byte} if n else {},
        "method": method,
        "method_settings": {"context_length": 512, "stride": 256},
        "corpus": "python-docs",
        "corpus_sha256": "31a44d4ee726" + "0" * 52,
        "plan_digest": "27fefac7135b2437",
        "model": "base-model",
        "model_fingerprint": "f00d",
        "stderr_groups": "documents",
        "engine": "transformers",
        "dtype": "float32",
        "head": "exact-fp32",
        "versions": {"transformers": "5.16.1", "scoremode": "0.1.0"},
        **more,
    }
    return Run("27fefac7135b2437", scores, facts, manifest)


def apart_by(kl: Any) -> Divergences:
    """Columns of a divergence, all known if KL is."""
    if kl is None:
        return Divergences()
    known = np.asarray(kl, np.float64)
    shares = -np.expm1(-known)
    first = (5 * np.exp(-known)).astype(np.int32) if not np.isnan(known).any() else np.zeros(len(known), np.int32)
    return Divergences(kl=known, kl_reverse=known / 2, total_variation=shares, same_first=first)


def compared(
    baseline: Any,
    candidate: Any,
    *,
    kl: Any = None,
    groups: Any = None,
    weight: Any = None,
    tops: Any = (None, None),
    name: str = "q4",
    noise_kl: Any = None,
    manifest: Any = None,
    apart: Divergences | None = None,
    **run: Any,
) -> Comparison:
    """A comparison of two runs made of these log-probabilities."""
    n = len(baseline)
    runs = [make_run(lp, top=t, weight=weight, **run) for lp, t in zip((baseline, candidate), tops, strict=True)]
    return Comparison(
        name=name,
        baseline=runs[0],
        candidate=runs[1],
        groups=np.arange(n) if groups is None else np.asarray(groups, np.int64),
        weight=np.ones(n) if weight is None else np.asarray(weight, np.float64),
        divergences=apart or apart_by(kl),
        noise_kl=None if noise_kl is None else np.asarray(noise_kl, np.float64),
        manifest=manifest or {},
    )


def test_both_directions_overlap_and_first_choices_by_hand() -> None:
    groups, apart = np.repeat(np.arange(6), 2), random_apart(12)
    found = compared([-1.0] * 12, [-1.0] * 12, apart=apart, groups=groups).statistics()
    assert found["kl_reverse_mean"] == pytest.approx(measured(apart.kl_reverse).mean(), rel=1e-12)
    assert found["total_variation_mean"] == pytest.approx(measured(apart.total_variation).mean(), rel=1e-12)
    assert found["overlap"] == pytest.approx(1 - found["total_variation_mean"], rel=1e-12)
    assert found["overlap_stderr"] == pytest.approx(found["total_variation_mean_stderr"], rel=1e-9)
    for count in range(2, 6):
        assert found[f"top{count}_same"] == pytest.approx((measured(apart.same_first) >= count).mean(), rel=1e-12)
        assert found[f"top{count}_same_stderr"] is not None


def test_a_divergence_of_an_older_run_has_kl_alone() -> None:
    found = compared([-1.0] * 6, [-1.0] * 6, apart=Divergences(kl=np.ones(6))).statistics()
    assert found["kl_mean"] == 1
    assert found["overlap"] is found["kl_reverse_mean"] is found["top5_same_low"] is None


def random_apart(n: int) -> Divergences:
    generator = np.random.default_rng(n)
    kl, reverse, variation = generator.random((3, n))
    return Divergences(kl, reverse, variation, generator.integers(0, 6, n).astype(np.int32))


def random_comparison(groups: int = 250, seed: int = 0, **more: Any) -> Comparison:
    """Unequal documents, each with its own level; both runs share most of their noise; KL with a long tail."""
    generator = np.random.default_rng(seed)
    index = np.repeat(np.arange(groups), generator.integers(3, 30, size=groups))
    n = len(index)
    base = -np.abs(generator.normal(2.0, 1.0, n) + generator.normal(0, 0.5, groups)[index])
    cand = np.minimum(0.0, base - 0.02 - generator.normal(0, 0.1, n) - generator.normal(0, 0.05, groups)[index])
    kl = generator.gamma(0.3, 0.1, n) * np.exp(generator.normal(0, 0.5, groups))[index]
    tops = (generator.integers(3, size=n), generator.integers(3, size=n))
    return compared(base, cand, kl=kl, groups=index, document=index, tops=tops, **more)


# ── hand-made ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_field_is_there_in_its_order_and_fit_for_json() -> None:
    found = random_comparison(20, noise_kl=[0.0, 0.1]).statistics()
    assert list(found) == ["name", *FIELDS]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [name for name, value in found.items() if value is None] == []


def test_declarations_have_names_of_their_own_and_say_what_they_are() -> None:
    assert len(FIELDS) == len(set(FIELDS)) == sum(len(statistic.fields) for statistic in STATISTICS)
    assert [statistic.name for statistic in STATISTICS if not statistic.about] == []
    assert {statistic.mean is not None for statistic in STATISTICS if statistic.ranks} == {True}
    page = (Path(__file__).parents[3] / "docs" / "statistics.md").read_text()
    assert [statistic.name for statistic in STATISTICS if f"`{statistic.name}`" not in page] == []


def test_kl_by_hand() -> None:
    """Six groups of two targets sum to 0.2, 0.4, …: a mean of 0.35, residuals of ±0.1, ±0.3, ±0.5 around 0.7."""
    kl = np.repeat(np.arange(1, 7) / 10, 2)
    found = compared([-1.0] * 12, [-1.0] * 12, kl=kl, groups=np.repeat(np.arange(6), 2)).statistics()
    assert math.isclose(found["kl_mean"], 0.35)
    assert math.isclose(found["kl_mean_stderr"], math.sqrt(6 / 5 * 0.7) / 12)
    reach = 2.570582 * found["kl_mean_stderr"] / 0.35  # Student's t with 5 degrees, on a log scale
    assert math.isclose(found["kl_mean_high"], 0.35 * math.exp(reach), rel_tol=1e-6)
    assert math.isclose(found["kl_mean_low"], 0.35 * math.exp(-reach), rel_tol=1e-6)
    assert math.isclose(found["freedom"], 5)
    assert math.isclose(found["kl_median"], 0.35)
    assert math.isclose(found["kl_p90"], 0.59)
    assert found["kl_max"] == 0.6
    assert found["kl_infinite"] == 0


def test_groups_of_unequal_size_by_hand() -> None:
    """Sizes 1, 1, 1, 1, 4: shares h of 1/8 and 1/2, each residual over 1 - h, freedom (Σh²)² / Σh⁴."""
    kl, groups = np.array([0.1, 0.2, 0.3, 0.4, 0.6, 0.6, 0.6, 0.6]), np.array([0, 1, 2, 3, 4, 4, 4, 4])
    found = compared([-1.0] * 8, [-1.0] * 8, kl=kl, groups=groups).statistics()
    mean = 3.4 / 8
    residuals = np.array([0.1 - mean, 0.2 - mean, 0.3 - mean, 0.4 - mean, 2.4 - 4 * mean])
    shares = np.array([1, 1, 1, 1, 4]) / 8
    assert math.isclose(found["kl_mean_stderr"], math.sqrt(float((residuals**2 / (1 - shares)).sum())) / 8)
    assert math.isclose(found["freedom"], float((shares**2).sum() ** 2 / (shares**4).sum()))


def test_shares_and_probabilities_by_hand() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    base, cand = [half, half, quarter, quarter] * 2, [quarter, half, half, quarter] * 2
    found = compared(base, cand, tops=([1, 2, 3, 4] * 2, [1, 2, 3, 5] * 2)).statistics()
    assert found["same_top"] == 0.75
    assert math.isclose(found["same_top_stderr"], math.sqrt(0.75 * 0.25 / 7))
    assert found["worse"] == 0.25
    assert math.isclose(found["delta_p_mean"], 0.0, abs_tol=1e-15)
    assert math.isclose(found["delta_p_rms"], math.sqrt(0.125 / 4))
    assert math.isclose(found["delta_p_min"], -0.25)
    assert math.isclose(found["delta_p_max"], 0.25)
    assert math.isclose(found["delta_logprob_mean"], 0.0, abs_tol=1e-15)


def test_weights_count_in_means_and_not_in_quantiles() -> None:
    found = compared([-1.0, -1.0, -1.0], [-1.0, -2.0, -1.0], kl=[0.0, 1.0, 0.5], weight=[1.0, 2.0, 1.0]).statistics()
    assert math.isclose(found["kl_mean"], 2.5 / 4)
    assert math.isclose(found["log_ppl_ratio"], 0.5)
    assert math.isclose(found["worse"], 0.5)
    assert found["kl_median"] == 0.5


@pytest.mark.parametrize("method", ["sliding-once", "mean-of-texts"])
def test_the_ratio_is_that_of_the_two_perplexities(method: str) -> None:
    c = random_comparison(30, method=method)
    found = c.statistics()
    assert math.isclose(found["ppl_ratio"], found["ppl_candidate"] / found["ppl_baseline"], rel_tol=1e-12)
    assert math.isclose(found["ppl_difference"], found["ppl_candidate"] - found["ppl_baseline"], rel_tol=1e-9)
    assert math.isclose(found["log_ppl_ratio"], math.log(found["ppl_ratio"]), rel_tol=1e-9)
    assert math.isclose(found["log_ppl_ratio_stderr"], found["ppl_ratio_stderr"] / found["ppl_ratio"], rel_tol=1e-9)


def test_a_mean_over_documents_by_hand() -> None:
    """Perplexities 2, 4 become 3, 5, three times: ratio 8 / 6, residuals 3 - 2·4/3 and 5 - 4·4/3."""
    base, cand = np.log([1 / 2, 1 / 4] * 3), np.log([1 / 3, 1 / 5] * 3)
    found = compared(base, cand, document=np.arange(6), method="mean-of-texts").statistics()
    assert math.isclose(found["ppl_ratio"], 4 / 3)
    error = math.sqrt(3 * (1 / 9) / (1 - 1 / 9) + 3 * (1 / 9) / (1 - 2 / 9)) / 18
    assert math.isclose(found["ppl_ratio_stderr"], error)
    assert math.isclose(found["ppl_difference"], 1.0)
    assert math.isclose(found["ppl_difference_stderr"], 0.0, abs_tol=1e-12)


def test_the_noise_floor_is_that_of_its_own_array() -> None:
    found = compared([-1.0, -1.0], [-1.0, -1.0], kl=[5.0, 5.0], noise_kl=[0.0, 0.01, 0.02]).statistics()
    assert math.isclose(found["noise_floor_kl_mean"], 0.01)
    assert math.isclose(found["noise_floor_kl_p99"], 0.0198)
    assert compared([-1.0], [-1.0], kl=[5.0]).statistics()["noise_floor_kl_mean"] is None


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("method", ["sliding-once", "mean-of-texts"])
def test_errors_agree_with_leaving_out_one_group_at_a_time(method: str) -> None:
    c = random_comparison(80, seed=2, method=method)
    found = c.statistics()
    left = []
    for g in range(80):
        keep = c.groups != g
        rest = {"groups": c.groups[keep], "document": c.groups[keep], "method": method}
        part = compared(c.baseline.scores.logprob[keep], c.candidate.scores.logprob[keep], kl=_of(c.kl)[keep], **rest)
        left.append(part.statistics())
    for name in ("kl_mean", "ppl_ratio", "log_ppl_ratio", "ppl_difference", "delta_p_mean", "delta_p_rms", "worse"):
        values = np.array([part[name] for part in left])
        jackknife = math.sqrt(79 / 80 * float(((values - values.mean()) ** 2).sum()))
        assert math.isclose(found[f"{name}_stderr"], jackknife, rel_tol=0.05), name


def test_the_bounds_are_students_t_around_the_value_and_further_on_the_side_of_a_long_tail() -> None:
    found = random_comparison(12, seed=1).statistics()
    assert 5 < found["freedom"] < 11  # documents differ in size
    scales = {"log_ppl_ratio": None, "ppl_difference": None, "delta_p_mean": None, "kl_mean": np.log, "same_top": logit}
    for name, scale in scales.items():
        value, error, low, high = (found[name + part] for part in ("", "_stderr", "_low", "_high"))
        if scale is not None:  # the error to first order, by a numerical derivative
            error *= (scale(value + 1e-6) - scale(value - 1e-6)) / 2e-6
            value, low, high = scale(value), scale(low), scale(high)
        near, far = sorted([high - value, value - low])
        assert 2.2 * error < near < 2.6 * error  # with 1.96 the bounds would be too narrow
        assert far == pytest.approx(near) if name == "same_top" else near * (1 - 1e-9) <= far < 10 * error
    assert math.isclose(found["ppl_ratio_low"], math.exp(found["log_ppl_ratio_low"]), rel_tol=1e-12)


def _of(array: Floats | None) -> Floats:
    assert array is not None
    return array


# ── odd shapes ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_one_target() -> None:
    found = compared([-1.0], [-1.5], kl=[0.2]).statistics()
    assert found["kl_mean"] == found["kl_max"] == found["kl_p99"] == 0.2
    assert math.isclose(found["ppl_ratio"], math.exp(0.5))
    assert [found[f"{name}_stderr"] for name in ("kl_mean", "ppl_ratio", "same_top", "delta_p_rms")] == [None] * 4
    unmeasured = compared([-1.0, -2.0], [-1.5, -2.0]).statistics()
    assert {value for name, value in unmeasured.items() if name.startswith("kl_")} == {None}
    assert math.isclose(unmeasured["log_ppl_ratio"], 0.25)


@pytest.mark.parametrize("groups", [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 3]])
def test_too_few_groups_have_no_errors_and_no_bounds(groups: list[int]) -> None:
    found = compared([-1.0, -2.0] * 2, [-1.5, -2.0] * 2, kl=[0.2, 0.4] * 2, groups=groups).statistics()
    nothing = {name for name, value in found.items() if value is None}
    errors = {n for n in FIELDS if n.endswith(("_stderr", "_low", "_high")) and "_baseline" not in n}
    errors -= {n for n in FIELDS if n.startswith("ppl_candidate")}  # each run's own, made by make_run
    assert nothing == errors | {"freedom", "noise_floor_kl_mean", "noise_floor_kl_p99"}
    assert math.isclose(found["kl_mean"], 0.3)


def test_groups_of_one_are_independent_targets_and_their_numbers_may_have_holes() -> None:
    kl = np.array([0.1, 0.5, 0.2, 0.7, 0.3])
    for groups in (None, [0, 5, 9, 11, 12]):
        found = compared([-1.0] * 5, [-1.0] * 5, kl=kl, groups=groups).statistics()
        assert (found["groups"], found["kl_mean_stderr"]) == (5, pytest.approx(kl.std(ddof=1) / math.sqrt(5)))


def test_equal_runs_have_no_difference_and_no_error_and_no_targets_no_numbers() -> None:
    c = random_comparison(20)
    same = compared(c.baseline.scores.logprob, c.baseline.scores.logprob, kl=np.zeros(len(c.groups)), groups=c.groups)
    found = same.statistics()
    ones = ("ppl_ratio", "ppl_ratio_low", "ppl_ratio_high", "same_top")
    zeros = ("log_ppl_ratio", "ppl_difference", "kl_mean", "kl_max", "delta_p_rms", "worse", "delta_p_mean")
    errors = ("ppl_ratio_stderr", "ppl_difference_stderr", "kl_mean_stderr", "delta_p_rms_stderr", "same_top_stderr")
    assert [found[name] for name in ones] == [1.0] * 4
    assert [found[name] for name in (*zeros, *errors)] == [0.0] * 12
    found = compared([], [], kl=[], noise_kl=[]).statistics()
    counted = {"name", "targets", "groups", "zero_probability_baseline", "zero_probability_candidate", "kl_infinite"}
    assert {name for name, value in found.items() if value is not None} == counted


def test_infinite_kl_is_counted_and_leaves_the_quantiles_below_it() -> None:
    found = compared([-1.0] * 5, [-1.0] * 5, kl=[0.1, 0.2, math.inf, 0.3, 0.4]).statistics()
    assert found["kl_infinite"] == 1
    assert [found[f"kl_{name}"] for name in ("mean", "mean_stderr", "mean_low", "mean_high", "max", "p90")] == [
        None
    ] * 6
    assert math.isclose(found["kl_median"], 0.3)


@pytest.mark.parametrize(("base", "cand"), [(-1.0, -math.inf), (-math.inf, -1.0), (-math.inf, -math.inf)])
def test_probability_zero_makes_ratios_unknown_and_is_counted(base: float, cand: float) -> None:
    comparison = compared([-1.0, base, -1.0], [-1.0, cand, -2.0])
    found = comparison.statistics()
    assert comparison.ppl_ratio.value == math.inf or math.isnan(comparison.ppl_ratio.value), "a ratio is never negative"
    names = ("ppl_ratio", "log_ppl_ratio", "ppl_difference", "delta_logprob_mean", "ppl_ratio_low", "ppl_ratio_stderr")
    assert [found[name] for name in names] == [None] * 6
    assert found["zero_probability_baseline"] == int(math.isinf(base))
    assert found["zero_probability_candidate"] == int(math.isinf(cand))
    expected = [math.exp(cand) - math.exp(base), math.exp(-2) - math.exp(-1)]
    assert math.isclose(found["delta_p_mean"], sum(expected) / 3)


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_number_is_an_attribute_with_the_value_of_the_statistics() -> None:
    c = random_comparison()
    s = c.statistics()
    for statistic in STATISTICS[6:]:  # the first ones are about targets and groups
        assert statistic.name in dir(c)
        if s[statistic.name] is not None:
            found = getattr(c, statistic.name)
            assert isinstance(found, Estimate) is statistic.has_error
            assert float(found) == s[statistic.name]
    kl: Estimate = c.kl_mean  # type checkers know it
    largest: float = c.kl_max
    assert 0 < kl <= largest
    assert f"kl mean {' '.join(rounded(s['kl_mean'], s['kl_mean_stderr'])).rstrip()}" in repr(c)
    assert f"same top {' '.join(rounded(s['same_top'], s['same_top_stderr'], percent=True)).rstrip()}" in repr(c)
    with pytest.raises(AttributeError, match="noise_floor_kl_mean of Comparison was not measured"):
        print(replace(c, noise_kl=None).noise_floor_kl_mean)
