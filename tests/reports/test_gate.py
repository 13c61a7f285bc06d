"""Rules: what they mean, which are refused, and that a statistic that was not measured fails."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scoremode.core.statistics.comparison import FIELDS
from scoremode.errors import OptionError
from scoremode.reports.gate import Rule, check, parse
from tests.core.statistics.test_comparison import compared, random_comparison

Q4: dict[str, Any] = {
    "name": "q4",
    "kl_mean": 0.0312,
    "kl_mean_stderr": 0.001,
    "kl_mean_low": 0.0289,
    "kl_mean_high": 0.0335,
    "kl_infinite": 0,
    "targets": 9,
}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kl_mean > 0.02", Rule("kl_mean", ">", 0.02)),
        ("  kl_mean>=2e-2 ", Rule("kl_mean", ">=", 0.02)),
        ("same_top<.95", Rule("same_top", "<", 0.95)),
        ("delta_p_mean <= -1", Rule("delta_p_mean", "<=", -1.0)),
        ("ppl_ratio > 1.01 surely", Rule("ppl_ratio", ">", 1.01, surely=True)),
    ],
)
def test_rules_are_read(text: str, rule: Rule) -> None:
    assert parse(text) == rule
    assert parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kl_maen > 0.02", ["no statistic 'kl_maen'", "did you mean 'kl_mean'?"]),
        ("kl-mean > 0.02", ["did you mean 'kl_mean'?"]),
        ("zzzz > 0.02", ["no statistic 'zzzz'", "known: "]),
        ("name > 0.02", ["no statistic 'name'"]),
        ("kl_mean == 0.02", ["'==' is not an operator", "use one of >, >=, <, <="]),
        ("kl_mean => 0.02", ["'=>' is not an operator"]),
        ("kl_mean > much", ["'much' is not a number"]),
        ("kl_mean > nan", ["'nan' is not a number"]),
        ("kl_mean > inf", ["'inf' is not a number"]),
        ("kl_mean > 1e999", ["'1e999' is not a number"]),
        ("kl_mean > 1_0", ["'1_0' is not a number"]),
        ("same_top < 95%", ["'95%' is not a number"]),
        ("kl_mean > 0.02 maybe", ["'maybe' after a rule", "only 'surely'"]),
        ("kl_p99 > 0.02 surely", ["kl_p99 has no error", "leave out 'surely'"]),
        ("kl_mean 0.02", ["is not a rule", "kl_mean > 0.02"]),
        ("", ["'' is not a rule"]),
        ("0.02 < kl_mean", ["no statistic '0.02'"]),
        ("__import__('os') > 1", ["no statistic"]),
        ("kl\x1bmean > 1", ["'kl�mean'"]),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, says: list[str]) -> None:
    with pytest.raises(OptionError) as refused:
        parse(text)
    message = str(refused.value)
    assert [part for part in says if part not in message] == []
    assert "\n" not in message
    assert refused.value.fix


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("kl_mean > 0.02", "q4: kl_mean is 0.0312, above 0.02"),
        ("kl_mean > 0.0311999", "q4: kl_mean is 0.0312, above 0.0311999"),
        ("kl_mean > 0.0312", None),
        ("kl_mean >= 0.0312", "q4: kl_mean is 0.0312, at or above 0.0312"),
        ("kl_mean < 0.0312", None),
        ("kl_mean <= 0.0312", "q4: kl_mean is 0.0312, at or below 0.0312"),
        ("kl_mean < 0.04", "q4: kl_mean is 0.0312, below 0.04"),
        ("targets < 10", "q4: targets is 9, below 10"),
        # surely: the bound that is nearer to passing
        ("kl_mean > 0.0288 surely", "q4: kl_mean is 0.0312 (95 %: 0.0289 to 0.0335), surely above 0.0288"),
        ("kl_mean > 0.0290 surely", None),
        ("kl_mean < 0.0336 surely", "q4: kl_mean is 0.0312 (95 %: 0.0289 to 0.0335), surely below 0.0336"),
        ("kl_mean < 0.0334 surely", None),
    ],
)
def test_the_value_or_surely_its_bound_is_judged(rule: str, why: str | None) -> None:
    assert check(parse(rule), Q4) == why


@pytest.mark.parametrize("sign", ["> 1e9", "< -1e9"])
@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        ("kl_mean", compared([-1.0], [-1.0]).statistics(), "KL was not measured"),
        (
            "kl_mean",
            compared([-1.0] * 2, [-1.0] * 2, kl=[1, math.inf]).statistics(),
            "targets with infinite KL: 1",
        ),
        ("ppl_ratio", compared([-1.0], [-math.inf]).statistics(), "targets with probability zero: 1"),
        ("noise_floor_kl_mean", random_comparison(5).statistics(), "the noise floor was not measured"),
        (
            "kl_mean_low",
            random_comparison(4).statistics(),
            "4 groups give no ± (5 are needed)",
        ),
        (
            "kl_mean_stderr",
            compared([-1.0], [-1.0], kl=[0.1]).statistics(),
            "1 group gives no ± (5 are needed)",
        ),
        ("same_top", compared([], []).statistics(), "there are no targets"),
        ("same_top", {"name": "q4"}, "these statistics do not have it"),
    ],
)
def test_what_is_not_known_fails_with_its_reason(name: str, found: dict[str, Any], reason: str, sign: str) -> None:
    assert check(parse(f"{name} {sign}"), found) == f"q4: {name} is not known: {reason}"


def test_every_field_can_be_named_and_a_hostile_name_stays_on_its_line() -> None:
    found = {**random_comparison(20, noise_kl=[0.0]).statistics(), "name": "q4\n\x1b[31m"}
    for name in FIELDS:
        why = check(parse(f"{name} > -1e9"), found)
        assert why is not None
        assert why.startswith("q4��[31m: ")
        assert "not known" not in why


def test_surely_is_refused_over_blocks_of_one_text_and_the_value_still_decides_without_it() -> None:
    known = {"name": "q4", "kl_mean": 0.5, "kl_mean_stderr": 0.01, "kl_mean_low": 0.4, "kl_mean_high": 0.6, "groups": 5}
    kind = "blocks of 1,240 tokens of this one text"
    assert check(parse("kl_mean > 0.1 surely"), known) is not None
    assert check(parse("kl_mean > 0.9 surely"), known) is None
    assert check(parse("kl_mean > 0.9 surely"), known, kind) == (
        f"q4: kl_mean cannot be judged 'surely': the error is over 5 {kind}, and 5 unrelated texts are needed"
    )
    assert check(parse("kl_mean > 0.9"), known, kind) is None


@pytest.mark.parametrize("rule", ["kl_mean < 0.7 surely", "kl_mean > 0.1 surely", "kl_mean > 0.9 surely"])
def test_of_few_documents_nothing_is_sure_unless_that_is_asked_for(rule: str) -> None:
    few = {"name": "q4", "kl_mean": 0.5, "kl_mean_low": 0.4, "kl_mean_high": 0.6, "groups": 7, "groups_effective": 6.3}
    assert check(parse(rule), few, "documents") == (
        "q4: kl_mean cannot be judged 'surely': 6.3 effective documents are too few; give at least 10 of about equal "
        "length, or --few-documents"
    )
    enough = check(parse(rule), {**few, "groups_effective": 10.0}, "documents")
    with_rate = "; with 6.3 effective documents such a claim is false in up to 8 % of skewed samples"
    assert check(parse(rule), few, "documents", few_documents=True) == (enough and enough + with_rate)


def test_being_sure_needs_an_error() -> None:
    found = compared([-1.0], [-1.0], kl=[0.1]).statistics()
    assert check(parse("kl_mean > 5"), found) is None
    assert check(parse("kl_mean > 5 surely"), found) == (
        "q4: kl_mean cannot be judged 'surely': 1 group gives no ± (5 are needed)"
    )
