"""Numbers and their errors, against closed forms and against a simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq
from scipy.special import expit, logit

import scoremode as sm
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import find_method
from scoremode.core.scores.columns import Scores
from scoremode.core.statistics.estimate import GroupSums, as_json, exponential, ratio
from scoremode.core.statistics.run import all_metrics
from scoremode.core.text.tokens import Tokens
from scoremode.engines.table.engine import TableEngine
from scoremode.values import Floats, Range
from tests.core.plan.streams import tokens_of
from tests.partial_engine import LOGITS


def scored(tokens: Tokens, plan: Plan, logprob: Floats) -> Scores:
    n = plan.targets
    return Scores(logprob, np.ones(n, np.int64), np.zeros(n), np.zeros(n, np.int32), np.zeros(n))


def test_a_ratio_of_equal_groups_is_the_mean_with_its_usual_error_and_a_perplexity_has_its_bounds() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 6.0])
    estimate = ratio(values, np.ones(5), np.arange(5))
    error = values.std(ddof=1) / math.sqrt(5)
    reach = 2.776445 * error  # Student's t, 4 degrees
    assert (estimate.value, estimate.freedom) == (3.2, 4)
    assert estimate.stderr == pytest.approx(error)
    assert (estimate.low, estimate.high) == pytest.approx((3.2 - reach, 3.2 + reach), rel=1e-6)
    ppl = exponential(estimate)
    assert (ppl.low, ppl.high) == pytest.approx((math.exp(3.2 - reach), math.exp(3.2 + reach)), rel=1e-6)


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_too_few_groups_have_no_error_instead_of_a_wrong_one(groups: int) -> None:
    """A group without units is not counted."""
    values, units = np.array([*range(1, groups + 1), 0.0]), np.array([*[1.0] * groups, 0.0])
    estimate = ratio(values, units, np.arange(groups + 1))
    assert estimate.value == (groups + 1) / 2
    assert (estimate.stderr, estimate.low, estimate.high, estimate.groups) == (None, None, None, groups)


def test_one_large_group_among_small_ones_leaves_few_degrees_of_freedom() -> None:
    """60 documents of which one has half of the text: nearly everything depends on that one."""
    sizes = np.array([5900.0, *[100.0] * 59])
    even = ratio(np.full(60, 100.0), np.full(60, 100.0), np.arange(60))
    uneven = ratio(sizes * 2, sizes, np.arange(60))
    assert even.freedom == 59
    assert uneven.freedom is not None
    assert uneven.freedom < 1.1


def test_tokens_that_move_together_are_not_counted_as_independent() -> None:
    """100 documents of 50 equal tokens: the error must be that of 100 draws, not of 5,000."""
    levels, groups = np.random.default_rng(0).normal(size=100), np.repeat(np.arange(100), 50)
    grouped, alone = (ratio(levels[groups], np.ones(5000), of).stderr for of in (groups, np.arange(5000)))
    assert grouped == pytest.approx(levels.std(ddof=1) / 10, rel=1e-9)
    assert (grouped or 0) > 6 * (alone or 1)


def test_hf_stride_weights_window_means() -> None:
    tokens = tokens_of(7)
    plan = make_plan(find_method("hf-stride"), tokens, context_length=4, stride=2)
    logprob = -np.array([1.0, 2.0, 3.0, 10.0, 20.0, 100.0])
    metrics = all_metrics(plan, tokens, scored(tokens, plan, logprob))
    assert math.isclose(metrics["mean_nll"].value, (3 * 2.0 + 1 * 15.0 + 0 * 100.0) / 4)
    assert math.isclose(metrics["perplexity"].value, math.exp(5.25))


def test_mean_of_texts_averages_perplexities_not_logs() -> None:
    tokens = tokens_of(2, 3, 1, 1, 1)
    plan = make_plan(find_method("mean-of-texts"), tokens, context_length=8)
    logprob = -np.log(np.array([2.0, 2.0, 8.0, 8.0, 8.0, 5.0, 5.0, 5.0]))
    estimate = all_metrics(plan, tokens, scored(tokens, plan, logprob))["perplexity"]
    assert (estimate.value, estimate.stderr) == pytest.approx((5.0, math.sqrt(18 / 4 / 5)))
    assert (estimate.n, estimate.groups) == (8, 5)


def test_bits_per_byte_counts_the_bytes_of_the_targets_or_of_the_source() -> None:
    tokens = tokens_of(9)
    plan = make_plan(find_method("gptq"), tokens, context_length=4)
    metrics = all_metrics(plan, tokens, scored(tokens, plan, np.full(6, -2 * math.log(2))))
    assert math.isclose(metrics["bits_per_byte"].value, 2.0)
    tokens = replace(tokens_of(4, 4), doc_bytes=np.array([100, 60]), doc_words=np.array([10, 6]))
    plan = make_plan(find_method("lm-eval-rolling"), tokens, context_length=8)
    metrics = all_metrics(plan, tokens, scored(tokens, plan, np.full(8, -4.0)))
    assert math.isclose(metrics["bits_per_byte"].value, 32 / 160 / math.log(2))
    assert math.isclose(metrics["word_perplexity"].value, math.exp(32 / 16))


def test_bits_per_byte_are_nats_per_token_over_ln_2_where_each_token_is_a_byte(tmp_path: Path) -> None:
    text = "".join(f'{{"text": "{"the cat sat on " * (2 + n)}{n}"}}\n' for n in range(7))
    (tmp_path / "texts.jsonl").write_text(text)
    run = sm.ppl("table:uniform", engine=TableEngine(LOGITS), corpus=str(tmp_path / "texts.jsonl"))
    bits, nats = run.bits_per_byte, run.mean_nll
    assert bits.groups == nats.groups == 7
    for name in ("value", "stderr", "low", "high"):
        assert getattr(bits, name) == pytest.approx(getattr(nats, name) / math.log(2), rel=1e-9)


def test_a_probability_of_zero_is_infinite_perplexity_and_null_in_json() -> None:
    estimate = exponential(ratio(np.array([1.0, np.inf]), np.ones(2), np.arange(2)))
    assert estimate.value == math.inf
    assert estimate.stderr is None
    assert as_json({"p": estimate})["p"]["value"] is None


# ── columns without a spread ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("value", [math.log(256), 0.1, 12345.678])
def test_millions_of_equal_values_have_exactly_that_mean_and_no_error(value: float) -> None:
    """Added one by one in float64, their rounding errors would differ from group to group and look like a spread."""
    groups = np.repeat(np.arange(7), [300_000, 1, 299_999, 400_000, 3, 500_001, 77_777])
    found = ratio(np.full(len(groups), value), np.ones(len(groups)), groups)
    assert found.stderr == 0.0
    assert found.low == found.value == found.high == value
    weights = 1 / (1.0 + groups)
    assert ratio(value * weights, weights, groups).stderr == 0.0


def test_sums_do_not_depend_on_the_order_of_targets_or_on_parts() -> None:
    random = np.random.default_rng(3)
    groups = np.sort(random.integers(0, 9, 5000))
    values = random.exponential(2.0, 5000) * 10 ** random.uniform(-9, 9, 5000)
    whole = ratio(values, np.ones(5000), groups)
    sums = GroupSums(9)
    for begin in range(0, 5000, 617):
        part = slice(begin, begin + 617)
        sums.add(groups[part], values[part], np.ones(len(values[part])))
    assert sums.estimate() == whole
    assert whole.value == pytest.approx(math.fsum(values) / 5000, rel=1e-15)
    assert whole.stderr == pytest.approx(ratio(values[::-1], np.ones(5000), groups[::-1]).stderr, rel=1e-12)


@pytest.mark.parametrize("method", ["sliding-once", "hf-stride"])
def test_a_uniform_table_has_exactly_8_bits_per_byte(method: str) -> None:
    """Also where a stretch of the text begins inside a character: its bytes and its tokens are of one group."""
    text = "x" + "東京 naïve 👩‍🔬 " * 7000  # 182,001 bytes: five stretches, and hardly a cut between two characters
    run = sm.ppl("table:uniform", text=text, method=method, context_length=512)
    assert run.mean_nll.groups >= 5
    assert (run.mean_nll.value, run.mean_nll.stderr) == (math.log(256), 0.0)
    if method == "sliding-once":  # the other one leaves the first token of a window out, which may own a character
        assert (run.bits_per_byte.value, run.bits_per_byte.stderr) == (8.0, 0.0)


# ── bounds in the range of a number ──────────────────────────────────────────────────────────────────────────────────
def test_bounds_of_a_positive_mean_are_those_of_its_logarithm() -> None:
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    found = ratio(values, np.ones(5), np.arange(5), "positive")
    error = stats.t.ppf(0.975, 4) * stats.sem(values) / values.mean()
    assert (found.low, found.high) == pytest.approx((0.3 * np.exp(-error), 0.3 * np.exp(error)))
    assert found.stderr == ratio(values, np.ones(5), np.arange(5)).stderr


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.9, 0.3, 0.15], [0.1, 0.2, 9.0, 0.3, 0.15]])
def test_a_long_tail_moves_the_bound_on_its_side_as_far_as_hall_says(values: list[float]) -> None:
    """Hall: the t at which t + k t²/3 + k² t³/27 + k/6, with its sign, is Student's quantile, by bisection."""
    values_, n = np.array(values), 5
    k, z = 2.5 * stats.skew(values_) / math.sqrt(n), stats.t.ppf(0.975, n - 1)
    by_hall = brentq(lambda t: t - min(k, 4.5 / t) * (t**2 / 3 + 1 / 6) + min(k, 4.5 / t) ** 2 * t**3 / 27 - z, z, 40)
    error = stats.sem(values_)
    mean, units, groups = values_.mean(), np.ones(n), np.arange(n)
    change = ratio(values_, units, groups, "change")
    assert (change.low, change.high) == pytest.approx((mean - z * error, mean + by_hall * error))
    mirrored = ratio(-values_, units, groups, "change")
    assert (mirrored.low, mirrored.high) == pytest.approx((-mean - by_hall * error, -mean + z * error))
    positive = ratio(values_, units, groups, "positive")
    assert positive.high == pytest.approx(max(mean + by_hall * error, mean * math.exp(z * error / mean)))


def test_shares_of_groups_that_are_all_yes_or_all_no_are_those_of_clopper_and_pearson() -> None:
    found = ratio(np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]), np.ones(7), np.arange(7), "share")
    exact = stats.binomtest(5, 7).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize(("spread", "unequal"), [(0.3, 0.0), (1.0, 0.0), (1.0, 0.7)])
def test_bounds_of_skewed_means_hold_as_often_as_promised(spread: float, unequal: float) -> None:
    """93 to 98 of 100; docs/statistics.md has the cells, with more draws."""
    random, held, draws = np.random.default_rng(5), 0, 600
    for _ in range(draws):
        size = np.exp(unequal * random.normal(size=20))
        level = np.exp(spread * random.normal(size=20) - spread**2 / 2)
        found = ratio(level * size, size, np.arange(20), "positive")
        held += (found.low or 0) <= 1 <= (found.high or 0)
    assert 0.93 - 0.03 <= held / draws <= 0.98 + 0.02  # three errors of 600 draws


def test_bounds_of_a_share_are_those_of_its_log_odds() -> None:
    values = np.array([0.9, 0.95, 1.0, 0.97, 0.99])
    found = ratio(values, np.ones(5), np.arange(5), "share")
    p = values.mean()
    reach = stats.t.ppf(0.975, 4) * stats.sem(values) / (p * (1 - p))
    assert (found.low, found.high) == pytest.approx((expit(logit(p) - reach), expit(logit(p) + reach)))
    assert found.high is not None
    assert found.high < 1 < ratio(values, np.ones(5), np.arange(5)).high  # type: ignore[operator]


@pytest.mark.parametrize("yes", [0.0, 1.0])
def test_groups_that_all_agree_count_as_one_answer_each(yes: float) -> None:
    """Clopper and Pearson: of seven groups, however many targets each has."""
    groups = np.repeat(np.arange(7), 50)
    found = ratio(np.full(350, yes), np.ones(350), groups, "share")
    exact = stats.binomtest(round(7 * yes), 7).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert (found.value, found.stderr) == (yes, 0.0)


@pytest.mark.parametrize("within", ["positive", "share"])
def test_extreme_values_keep_their_bounds_in_range(within: Range) -> None:
    for values in ([1e-300] * 4 + [1e-10], [0.0] * 4 + [1e-12], [1.0] * 4 + [1 - 1e-12], [0.0] * 5, [1 + 1e-15] * 5):
        found = ratio(np.array(values), np.ones(5), np.arange(5), within)
        assert found.low is not None
        assert found.high is not None
        assert 0 <= found.low <= found.value <= found.high
        assert within == "positive" or found.high <= 1 + 2e-15


@pytest.mark.parametrize("size", [1e-110, 1e105])
def test_very_small_and_very_large_sums_have_bounds(size: float) -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 9.0, 40.0])
    found, usual = (ratio(values * scale, np.ones(6), np.arange(6), "positive") for scale in (size, 1.0))
    assert (found.low, found.high) == pytest.approx((size * (usual.low or 0), size * (usual.high or 0)))
