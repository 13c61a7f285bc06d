"""The 95 % bounds hold about 95 times in 100, on real scores, from 5 groups on."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from scoremode.core.statistics.groups import FALSE_OF_FEW, SHORTEST, STRETCH
from scoremode.reports.ranking import p_of_pair

TAILS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "long_tails.py"))
SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "coverage.py"))
GROUPS, NUMBERS, read = SCRIPT["GROUPS"], SCRIPT["NUMBERS"], SCRIPT["read"]
neighbours, of_documents, of_stretches = (SCRIPT[name] for name in ("neighbours", "of_documents", "of_stretches"))
of_shares, of_blocks = SCRIPT["of_shares"], SCRIPT["of_blocks"]
false_no_worse, sums_of = SCRIPT["false_no_worse"], SCRIPT["sums_of"]
DRAWS = 1500
SLACK = 0.017  # three standard errors of a share of 0.95 over so many draws


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("number", NUMBERS)
def test_bounds_over_real_articles_hold_93_to_97_times_in_100(number: str, groups: int) -> None:
    share = of_documents("wikitext2_articles", number, groups, DRAWS, seed=1)
    assert 0.93 - SLACK < share < 0.97 + SLACK


@pytest.mark.parametrize("number", NUMBERS)
def test_bounds_hold_where_documents_differ_in_size_by_a_factor_of_270(number: str) -> None:
    sizes = read("python_docs")
    assert sizes["tokens"].min() < 60
    assert 0.93 - SLACK < of_documents("python_docs", number, 30, DRAWS, seed=1) < 0.98 + SLACK


@pytest.mark.parametrize("number", ["nll", "kl_w4"])
def test_stretches_of_a_long_text_may_serve_and_shorter_ones_may_not(number: str) -> None:
    assert of_stretches(number, 10, 400, seed=1) > 0.88
    assert of_stretches(number, 30, 400, seed=1, length=2048) < 0.85
    assert neighbours(number, 2048) > 0.4
    assert abs(neighbours(number, STRETCH)) < 0.5


# ── shares ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("groups", [5, 10, 40])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("drawn", ["200 per group", "means"])
def test_bounds_of_shares_stay_inside_and_hold_93_to_97_times_in_100(drawn: str, share: float, groups: int) -> None:
    found = of_shares(drawn, share, groups, unequal=False, draws=600, seed=1)
    assert 0.93 - 0.027 < found < 0.97 + 0.027  # three standard errors


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize(("share", "groups"), [(0.5, 5), (0.8, 10), (0.98, 5), (0.98, 20), (0.9, 40)])
def test_one_yes_or_no_per_group_is_too_coarse_for_exactly_95_but_holds_at_least_93(
    share: float, groups: int, unequal: bool
) -> None:
    assert of_shares("one yes or no", share, groups, unequal=unequal, draws=600, seed=1) > 0.93 - 0.03


# ── a few documents that lose much ───────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("number", ["delta_w4", "kl_w8", "kl_w4", "same_w8", "same_w4"])
def test_bounds_hold_on_prose_beside_code_beside_other_languages(number: str) -> None:
    """From ten documents on. Five of four kinds lack one of them in a fifth of the draws."""
    assert 0.92 - SLACK < of_documents("mixed_texts", number, 10, DRAWS, seed=1) < 0.97 + SLACK
    assert of_documents("mixed_texts", number, 5, DRAWS, seed=1) > 0.85


@pytest.mark.parametrize("number", ["delta_w8", "delta_w4"])
@pytest.mark.parametrize("groups", [5, 20])
def test_no_worse_is_false_at_most_5_times_in_100_on_mixed_texts(number: str, groups: int) -> None:
    assert false_no_worse(number, groups, DRAWS, seed=1) < 0.05 + SLACK


@pytest.mark.parametrize("documents", [9, 12, 20])
@pytest.mark.parametrize("uneven", TAILS["LENGTHS"].values())
def test_the_product_has_the_bounds_and_p_values_of_formulas_that_are_not_its_own(
    uneven: float, documents: int
) -> None:
    random, shape = np.random.default_rng(7), (40, documents)
    size, loss = TAILS["sizes"](uneven, shape, random), TAILS["losses"](1.0, (*shape, 2), random)
    kl, change = TAILS["means"](size, loss[:, :, 0]), TAILS["means"](size, loss[:, :, 0] - 1)
    of_kl, of_change = TAILS["bounds_of_kl"](kl), TAILS["bounds_of_change"](change)
    pairs = TAILS["p_of_rules"](loss, size)["ours"]
    for draw in range(len(size)):
        first, second = (sums_of(loss[draw, :, i] * size[draw], size[draw]) for i in (0, 1))
        ours = first.estimate("positive")
        assert (ours.low, ours.high) == pytest.approx([bound[draw] for bound in of_kl])
        ours = sums_of((loss[draw, :, 0] - 1) * size[draw], size[draw]).estimate("change")
        assert (ours.low, ours.high) == pytest.approx([bound[draw] for bound in of_change])
        assert p_of_pair(first, second) == pytest.approx(pairs[draw, 0])


@pytest.mark.parametrize(("spread", "least"), [(0.3, 0.93), (0.7, 0.93), (1.0, 0.915), (1.5, 0.86)])
@pytest.mark.parametrize("uneven", TAILS["LENGTHS"].values())
@pytest.mark.parametrize("documents", TAILS["DOCUMENTS"])
def test_bounds_and_claims_are_right_as_often_as_documented(
    spread: float, least: float, uneven: float, documents: int
) -> None:
    """docs/statistics.md: the goals are 93 % with σ up to 1, and 90 % with 1.5; five documents miss them a little."""
    shares = TAILS["cell"](spread, uneven, documents, 4000, seed=1)
    noise = 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert (
        min(shares["KL"], shares["ratio"])
        > (least if documents < 10 else max(least, 0.93 if spread <= 1 else 0.9)) - noise
    )
    if spread <= 1 and not math.isnan(shares["no worse"]):
        assert shares["no worse"] < 0.08 + 2 * noise
        assert shares["likelier"] < 0.05 + noise


@pytest.mark.parametrize("documents", [10, 20])
@pytest.mark.parametrize("spread", [0.7, 1.5, None])
@pytest.mark.parametrize(("kind", "uneven"), [("alone", 0.0), ("alone", 1.2), ("alike", 0.7), ("long", 1.2)])
def test_the_ranking_is_false_at_most_5_times_in_100_and_has_nine_tenths_of_the_power_of_others(
    kind: str, uneven: float, spread: float | None, documents: int
) -> None:
    draws = 300
    rules = TAILS["ranking"](spread, uneven, documents, draws, seed=1, kind=kind)
    false, power = rules["ours"]
    best = max(rules["flips"][1], rules["weighted"][1])
    assert false < 0.05 + 3 * (0.05 * 0.95 / draws) ** 0.5
    assert power > 0.9 * best - 3 * (best * (1 - best) / draws) ** 0.5


def test_how_often_claims_of_few_documents_are_false_was_measured() -> None:
    """The table that sentences quote, in whole per cent, beside a shorter run of the script that made it."""
    draws = 3000
    measured = TAILS["false_of_few"](draws, seed=1)
    measured["direction"] = np.maximum(measured["direction"], measured.pop("surely"))
    for claim, shares in measured.items():
        for share, told in zip(shares, FALSE_OF_FEW[claim], strict=True):
            noise = 3 * (told / 100 / (draws / 10)) ** 0.5  # the smallest cell has a tenth of the draws
            assert share == pytest.approx(told / 100, abs=0.01 + noise)


# ── one text ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("number", ["nll", "kl_w4", "same_w4"])
def test_few_long_blocks_hold_better_and_none_hold_well_enough_for_a_gate(number: str) -> None:
    few, many = ([of_blocks(kind, number, 20 * SHORTEST, blocks) for kind in SCRIPT["LONG"]] for blocks in (5, 20))
    assert sum(few) > sum(many) + 0.2
    assert 0.6 < sorted(few)[2] < 0.93  # the median of five texts
