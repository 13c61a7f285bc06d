"""Statistics of tasks against closed forms, other people's implementations, and simulations that know the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from scoremode.reports import gate
from scoremode.studies.tasks.results import parse, why_unknown
from scoremode.studies.tasks.statistics import (
    FIELDS,
    PairedTask,
    difference,
    mcnemar,
    mean,
    recovery,
    row_statistics,
    share,
    wilson,
)
from scoremode.values import Floats

Cells = tuple[int, int, int, int]  # right in both, gained, lost, wrong in both


def columns(cells: Cells) -> tuple[Floats, Floats]:
    """Documents of the four kinds, of the baseline and of the candidate."""
    both, gained, lost, neither = cells
    base = np.repeat([1.0, 0.0, 1.0, 0.0], [both, gained, lost, neither])
    cand = np.repeat([1.0, 1.0, 0.0, 0.0], [both, gained, lost, neither])
    return base, cand


def task(cells: Cells, name: str = "t") -> PairedTask:
    return PairedTask(name, "acc", {"acc": columns(cells)})


# ── McNemar ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("lost", "gained"), [(0, 5), (2, 3), (40, 12), (3, 300), (500, 500), (2000, 1800), (1, 0)])
def test_mcnemar_is_scipys_binomial_test(lost: int, gained: int) -> None:
    assert mcnemar(0, 0) == 1.0
    expected = stats.binomtest(lost, lost + gained, 0.5).pvalue
    assert mcnemar(lost, gained) == pytest.approx(expected, rel=1e-9)


# ── closed forms ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_accuracy_has_the_error_that_lm_eval_prints() -> None:
    metrics = pytest.importorskip("lm_eval.api.metrics")
    values = columns((70, 0, 0, 30))[0]
    found = share([(values > 0, 1.0)])
    assert found.value == pytest.approx(metrics.mean(values.tolist()))
    assert found.stderr == pytest.approx(metrics.mean_stderr(values.tolist()), rel=1e-12)


def test_wilson_is_scipys() -> None:
    for k, n in ((0, 30), (7, 30), (30, 30), (499, 1000)):
        expected = stats.binomtest(k, n).proportion_ci(method="wilson")
        assert wilson(k / n, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_recovery_and_its_error_in_closed_form() -> None:
    """For a 2×2 table the first-order variance of log(p₁/p₀) is (b + c) / ((a + b)(a + c)), here with b + ½, c + ½."""
    a, b, c, d = 600, 20, 45, 335
    found = recovery([(columns((a, b, c, d)), 1.0)])
    assert found.value == pytest.approx((a + b) / (a + c))
    variance = (b + c + 1) / ((a + b + 0.5) * (a + c + 0.5)) * (a + b + c + d + 1) / (a + b + c + d)
    assert found.stderr == pytest.approx(found.value * math.sqrt(variance), rel=1e-9)
    centre, reach = math.log((a + b + 0.5) / (a + c + 0.5)), stats.t.ppf(0.975, a + b + c + d) * math.sqrt(variance)
    assert (found.low, found.high) == pytest.approx((math.exp(centre - reach), math.exp(centre + reach)), rel=1e-9)


def test_the_difference_in_closed_form() -> None:
    a, b, c, d = 600, 20, 45, 335
    n = a + b + c + d + 1
    found = difference([(columns((a, b, c, d)), 1.0)])
    assert found.value == pytest.approx((b - c) / (n - 1))
    assert found.stderr == pytest.approx(math.sqrt((b + c + 1 - (b - c) ** 2 / n) / n / (n - 1)), rel=1e-9)


def test_means_over_tasks_are_weighted_and_their_variances_add_up() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=40), rng.normal(3, 5, size=90)
    found = mean([(one, 0.25), (other, 0.75)])
    assert found.value == pytest.approx(0.25 * one.mean() + 0.75 * other.mean())
    parts = [0.25**2 * one.var(ddof=1) / 40, 0.75**2 * other.var(ddof=1) / 90]
    assert found.stderr == pytest.approx(math.sqrt(sum(parts)))
    assert found.freedom == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 39 + parts[1] ** 2 / 89))


# ── what cannot be known ─────────────────────────────────────────────────────────────────────────────────────────────
def test_recovery_of_a_baseline_that_has_nothing_right_is_undefined() -> None:
    row = row_statistics("t", "task", [(task((0, 3, 0, 20)), 1.0)])
    assert row["recovery"] is None
    why = gate.check(parse("recovery < 0.99").rule, {**row, "name": "q4"}, why_unknown=why_unknown)
    assert why == "q4: recovery is not known: the baseline has nothing right"


def test_few_documents_have_no_error() -> None:
    row = row_statistics("t", "task", [(task((2, 1, 0, 1)), 1.0)])
    assert row["recovery"] == 1.5
    assert row["recovery_stderr"] is None
    assert "give no ±" in str(
        gate.check(parse("recovery < 2 surely").rule, {**row, "name": "q4"}, why_unknown=why_unknown)
    )


def test_metrics_between_right_and_wrong_have_recovery_but_no_flips() -> None:
    rng = np.random.default_rng(1)
    base = rng.uniform(0.2, 0.9, 200)
    pair = (base, base * 0.9 + rng.normal(0, 0.01, 200))
    row = row_statistics("t", "task", [(PairedTask("t", "mc2", {"mc2": pair}), 1.0)])
    assert row["recovery"] == pytest.approx(0.9, abs=0.01)
    assert row["recovery_low"] < row["recovery"] < row["recovery_high"]
    assert row["flips"] is row["mcnemar"] is row["lost_documents"] is None


def test_a_probability_of_zero_is_not_averaged() -> None:
    whole = columns((5, 1, 1, 5))
    margins = (np.full(12, -1.0), np.array([-math.inf, *[-1.0] * 11]))
    row = row_statistics("t", "task", [(PairedTask("t", "acc", {"acc": whole}, margin=margins), 1.0)])
    assert row["margin_shift"] is None


def test_every_field_is_there_and_finite_or_none() -> None:
    row = row_statistics("t", "task", [(task((50, 5, 5, 40)), 1.0)])
    assert tuple(row) == ("name", "kind", "metric", *FIELDS)
    assert all(value is None or isinstance(value, str | int) or math.isfinite(value) for value in row.values())


# ── coverage ─────────────────────────────────────────────────────────────────────────────────────────────────────────
LEAST_COVERAGE = 0.938  # of 95 %, over 2,000 draws: three standard errors of the draws below


@pytest.mark.parametrize("n", [20, 100, 1000])
@pytest.mark.parametrize("right", [0.05, 0.3, 0.7, 0.97])
@pytest.mark.parametrize(("lost", "regained"), [(0.02, 0.7), (0.1, 0.5), (0.3, 1.0)])
def test_bounds_of_recovery_contain_the_truth(n: int, right: float, lost: float, regained: float) -> None:
    """Accuracies near 0 and near 1, few documents and many, few flips and many."""
    gone = right * lost
    back = min(gone * regained, 1 - right)
    truth = (right - gone + back) / right
    rng = np.random.default_rng(7)
    draws = rng.multinomial(n, [right - gone, back, gone, 1 - right - back], 2000)
    inside = [low <= truth <= high for low, high in map(_bounds, draws.tolist()) if not math.isnan(low)]
    assert np.mean(inside) >= LEAST_COVERAGE


def _bounds(cells: list[int]) -> tuple[float, float]:
    """As ``recovery`` computes them; a test below holds the two together."""
    a, b, c, d = cells
    n = a + b + c + d
    if a + c == 0:
        return math.nan, math.nan
    top, bottom = (a + b + 0.5) / (n + 1), (a + c + 0.5) / (n + 1)
    moment = (a * (1 / top - 1 / bottom) ** 2 + (b + 0.5) / top**2 + (c + 0.5) / bottom**2) / (n + 1)
    reach = stats.t.ppf(0.975, n) * math.sqrt(moment / n)
    centre, value = math.log(top / bottom), (a + b) / (a + c)
    return min(value, math.exp(centre - reach)), max(value, math.exp(centre + reach))


@pytest.mark.parametrize("cells", [(600, 20, 45, 335), (6, 0, 0, 4), (1, 2, 3, 14), (0, 0, 20, 20)])
def test_the_simulated_bounds_are_those_of_recovery(cells: Cells) -> None:
    found = recovery([(columns(cells), 1.0)])
    assert (found.low, found.high) == pytest.approx(_bounds(list(cells)), rel=1e-9)


def test_bounds_over_tasks_contain_the_truth() -> None:
    """Three tasks of different sizes and difficulties that count alike."""
    sizes, rights, gone, back = (40, 150, 400), (0.3, 0.6, 0.9), (0.03, 0.05, 0.02), (0.02, 0.02, 0.02)
    truth = sum(r - g + b for r, g, b in zip(rights, gone, back, strict=True)) / sum(rights)
    rng, inside = np.random.default_rng(11), []
    for _ in range(1500):
        pairs = []
        for n, r, g, b in zip(sizes, rights, gone, back, strict=True):
            cells = rng.multinomial(n, [r - g, b, g, 1 - r - b]).tolist()
            pairs.append((columns((cells[0], cells[1], cells[2], cells[3])), 1 / 3))
        found = recovery(pairs)
        assert found.low is not None
        assert found.high is not None
        inside.append(found.low <= truth <= found.high)
    assert np.mean(inside) >= 0.93


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_differences_too_small_to_be_squared_have_errors() -> None:
    """Both models all but certain of every choice: KL of 1e-90 and less."""
    found = mean([(np.array([1e-90, 2e-90, 3e-90, 4e-90, 10e-90]), 1.0)])
    usual = mean([(np.array([1.0, 2.0, 3.0, 4.0, 10.0]), 1.0)])
    assert found.stderr is not None
    assert usual.stderr is not None
    assert found.stderr == pytest.approx(usual.stderr * 1e-90, rel=1e-12, abs=0)
    assert found.freedom == pytest.approx(4)
