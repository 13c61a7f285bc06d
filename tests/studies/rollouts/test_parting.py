"""Where models part: against survival that is written out by hand, Greenwood's formula, and simulated prompts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from scoremode.errors import RunError
from scoremode.studies.rollouts.parting import Partings, Survival, partings
from scoremode.studies.rollouts.readings import TextRatios
from scoremode.studies.rollouts.tables import parting_blocks, text_ratios_blocks
from scoremode.values import Bools, Ints
from tests.reports.test_table import drawn


def of_texts(texts: list[tuple[int, str]], noise: float = 0.02) -> Partings:
    """Texts with their prompts; each letter is a target: ``=`` the same choice, ``~`` a near-tie, ``x`` a parting."""
    letters = [(number, prompt, letter) for number, (prompt, word) in enumerate(texts) for letter in word]
    text, group = (np.array([row[i] for row in letters], np.int64) for i in (0, 1))
    token = np.full(len(letters), 7, np.int32)
    top = np.array([7 if letter == "=" else 3 for *_, letter in letters], np.int32)
    gap = np.array([{"=": 0.0, "~": 0.01, "x": 0.5}[letter] for *_, letter in letters])
    return partings(text, group, token, top, gap, noise=noise)


def longhand_survival(ends: list[int], parts: list[bool], t: int) -> tuple[float, float]:
    """Kaplan-Meier and Greenwood's variance of ln S, token by token."""
    survival, variance = 1.0, 0.0
    for u in range(1, t + 1):
        at_risk = sum(e >= u for e in ends)
        parted = sum(e == u and p for e, p in zip(ends, parts, strict=True))
        survival *= 1 - parted / at_risk
        variance += parted / (at_risk * (at_risk - parted)) if parted < at_risk else math.inf
    return survival, variance


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_first_other_choice_and_the_first_parting_are_found() -> None:
    found = of_texts([(0, "==="), (0, "=~x="), (1, "x"), (1, "~~"), (2, "=x~x")])
    assert found.length.tolist() == [3, 4, 1, 2, 4]
    assert found.first_other.tolist() == [0, 2, 1, 1, 2]
    assert found.first_parting.tolist() == [0, 3, 1, 0, 2]
    assert (found.other_choices, found.near_ties) == (8, 4)
    assert found.statistics()["without_parting"] == pytest.approx(2 / 5)
    assert found.statistics()["without_other_choice"] == pytest.approx(1 / 5)


def test_a_gap_as_large_as_the_noise_is_a_near_tie() -> None:
    assert of_texts([(0, "~")], noise=0.01).first_parting.tolist() == [0]
    assert of_texts([(0, "~")], noise=0.0099).first_parting.tolist() == [1]
    assert of_texts([(0, "x")], noise=0.0).first_parting.tolist() == [1]


def test_an_impossible_token_is_a_parting_and_nan_is_refused() -> None:
    one = np.array([1])
    assert partings(one, one, one, one + 1, np.array([np.inf]), noise=9.0).first_parting.tolist() == [1]
    with pytest.raises(RunError, match="NaN"):
        partings(one, one, one, one, np.array([np.nan]))


def test_survival_and_its_error_are_those_of_kaplan_meier_and_greenwood() -> None:
    random = np.random.default_rng(3)
    ends, parts = random.integers(1, 30, 200), random.random(200) < 0.4
    found = Survival(ends, parts, np.arange(200))
    for t in (1, 2, 5, 11, 20, 28):
        value, variance = longhand_survival(ends.tolist(), parts.tolist(), t)
        estimate = found.at(t)
        assert estimate.value == pytest.approx(value, rel=1e-12)
        assert estimate.n == (ends >= t).sum()
        greenwood = value * math.sqrt(variance * 200 / 199)
        assert estimate.stderr == pytest.approx(greenwood, rel=1e-9)
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 < estimate.low < value < estimate.high < 1
        # the same distance on the scale ln(-ln S), by the factor of Student's t with 199 degrees of freedom
        scaled = [math.log(-math.log(bound)) - math.log(-math.log(value)) for bound in (estimate.high, estimate.low)]
        reach = 1.971957 * greenwood / value / -math.log(value)
        assert scaled == pytest.approx([-reach, reach], rel=1e-5)
    assert found.at(0).value == 1
    assert math.isnan(found.at(30).value)


def test_equal_texts_of_a_prompt_count_as_one() -> None:
    random = np.random.default_rng(4)
    ends, parts = random.integers(1, 30, 60), random.random(60) < 0.4
    once, thrice = (Survival(*(np.repeat(a, n) for a in (ends, parts, np.arange(60)))) for n in (1, 3))
    for t in (3, 10, 20):
        assert thrice.at(t).value == pytest.approx(once.at(t).value, rel=1e-12)
        assert thrice.at(t).stderr == pytest.approx(once.at(t).stderr, rel=1e-9)


def test_ends_of_the_curve_have_honest_bounds() -> None:
    nothing = Survival(np.full(40, 9), np.zeros(40, np.bool_), np.repeat(np.arange(10), 4)).at(9)
    assert (nothing.value, nothing.high) == (1, 1)
    assert nothing.low == pytest.approx(0.025 ** (1 / 10))  # ten prompts, not forty texts
    gone = Survival(np.repeat([2, 5], 20), np.ones(40, np.bool_), np.arange(40))
    assert (gone.at(5).value, gone.at(5).low) == (0, 0)
    assert gone.at(5).high == gone.at(4).high
    assert gone.at(4).value == 0.5
    assert (gone.median(), Survival(np.array([3]), np.array([False]), np.array([0])).median()) == (2, None)
    few = Survival(np.full(8, 3), np.arange(8) < 4, np.repeat(np.arange(4), 2)).at(3)
    assert (few.value, few.stderr, few.low) == (0.5, None, None)


def test_no_texts_and_texts_of_one_token() -> None:
    none = of_texts([])
    assert none.statistics()["survival"] == []
    assert none.statistics()["without_parting"] is None
    single = of_texts([(n, "x" if n % 2 else "=") for n in range(10)]).statistics()
    assert [row["length"] for row in single["survival"]] == [1]
    assert single["survival"][0]["no_parting"] == 0.5
    assert json.loads(json.dumps(single, allow_nan=False)) == single


# ── coverage ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def simulated(random: np.random.Generator, prompts: int, samples: int, tokens: int) -> tuple[Ints, Bools, Ints]:
    """Each prompt has a hazard of its own, so that its samples are alike; texts end at random."""
    hazard = np.repeat(random.choice([0.004, 0.06], prompts), samples)
    part, end = random.geometric(hazard), random.integers(5, tokens, prompts * samples)
    return np.minimum(part, end), part <= end, np.repeat(np.arange(prompts), samples)


def test_bounds_contain_the_true_survival_and_need_the_prompts() -> None:
    random, t = np.random.default_rng(5), 15
    truth = (0.996**t + 0.94**t) / 2
    hits = {"prompt": 0, "text": 0}
    for _ in range(400):
        ends, parts, group = simulated(random, 40, 6, 60)
        for kind, groups in (("prompt", group), ("text", np.arange(len(ends)))):
            found = Survival(ends, parts, groups).at(t)
            assert found.low is not None
            assert found.high is not None
            hits[kind] += found.low <= truth <= found.high
    assert 0.92 <= hits["prompt"] / 400 <= 0.98
    assert hits["text"] / 400 < 0.85  # as if samples of a prompt were independent


# ── sampled texts ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_log_ratios_of_texts_are_those_of_a_loop() -> None:
    random = np.random.default_rng(6)
    lengths = random.integers(1, 9, 24)
    text, prompt = np.repeat(np.arange(24), lengths), np.repeat(np.arange(24) // 3, lengths)
    writer = -random.exponential(1.0, len(text))
    reader = np.minimum(0, writer - random.normal(0.1, 0.2, len(text)))
    found = TextRatios(text, prompt, writer, reader)
    sums = np.array([(reader - writer)[text == i].sum() for i in range(24)])
    assert found.log_ratio.value == pytest.approx(sums.mean(), rel=1e-12)
    by_prompt = sums.reshape(8, 3).mean(axis=1)
    assert found.log_ratio.stderr == pytest.approx(by_prompt.std(ddof=1) / math.sqrt(8), rel=1e-9)
    assert found.ppl_ratio.value == pytest.approx(math.exp((writer - reader).mean()), rel=1e-12)
    assert (found.log_ratio.n, found.log_ratio.groups, found.impossible) == (24, 8, 0)


def test_an_impossible_token_is_counted_and_not_averaged() -> None:
    text, lp = np.repeat(np.arange(6), 2), np.full(12, -1.0)
    reader = lp.copy()
    reader[3] = -np.inf
    found = TextRatios(text, text, lp, reader).statistics()
    assert (found["impossible"], found["log_ratio"], found["ppl_ratio"]) == (1, None, None)


def test_once_every_text_has_parted_none_goes_on() -> None:
    found = of_texts([(n, "x===") for n in range(6)])
    assert [found.survival().at(length).value for length in (0, 1, 2, 99)] == [1, 0, 0, 0]
    assert (found.survival().at(2).n, found.lengths()) == (0, [1, 2, 4])
    ended = of_texts([(n, "=x"[: 1 + n % 2]) for n in range(6)])  # half are censored at their first token
    assert [ended.survival().at(length).value for length in (1, 2, 3)] == [1, 0, 0]


# ── shown ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_tables_show_both_figures() -> None:
    found = of_texts([(n, "=" * n + "~==x"[: n % 5]) for n in range(1, 40)])
    shown = drawn(parting_blocks([(0, "q4", found.statistics())]))
    assert "without a parting" in shown
    assert "near-ties" in shown
    text = np.repeat(np.arange(6), 2)
    reads = TextRatios(text, text, np.full(12, -1.0), np.linspace(-2, -1, 12)).statistics()
    assert "perplexity ratio" in drawn(text_ratios_blocks([(0, "base", "q4", reads), (1, "q4", "base", reads)]))


@pytest.mark.parametrize("texts", [5, 10, 20])
def test_texts_that_all_agree_are_not_certain(texts: int) -> None:
    """Each text goes on without a parting with a chance of 0.9: the bounds contain it, also where no text parts."""
    random, held = np.random.default_rng(4), 0
    for _ in range(300):
        parted = random.random(texts) < 0.1
        gap, token = np.ones(texts), np.zeros(texts, np.int32)
        found = partings(np.arange(texts), np.arange(texts), token, parted.astype(np.int32), gap).statistics()
        low, high = found["without_parting_low"], found["without_parting_high"]
        assert 0 <= low < high <= 1
        held += low <= 0.9 <= high
    assert held / 300 > 0.93
    nobody = partings(np.arange(texts), np.arange(texts), token, token, gap)
    low = nobody.statistics()["without_parting_low"]
    assert low == nobody.survival().at(1).low == pytest.approx(0.025 ** (1 / texts))
