"""The sentence about a candidate: its level follows from the paired error, the noise floor and the number of tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode.report.verdicts import rule_words, verdicts
from scoremode.statistics.comparison import Comparison, comparison_statistics
from tests.statistics.test_comparison import compared

GROUPS = 40


def shifted(mean: float, *, kl: float = 0.1, floor: float | None = 0.001, name: str = "q4") -> Comparison:
    """A candidate whose tokens are less likely by ``mean``, give or take 0.01, in groups of one target."""
    base = np.full(GROUPS, -2.0)
    moved = base - mean - 0.01 * np.linspace(-1.7, 1.7, GROUPS)
    measured: dict[str, Any] = {"kl": np.full(GROUPS, kl), "noise_kl": None if floor is None else np.full(4, floor)}
    return compared(base, moved, groups=np.arange(GROUPS), name=name, **measured)


def judged(comparisons: Sequence[Comparison]) -> list[str]:
    return [v.level for v in verdicts(comparisons, [comparison_statistics(c) for c in comparisons])]


@pytest.mark.parametrize(
    ("mean", "level"),
    [(0.1, "clearly worse"), (-0.1, "clearly better"), (0.0001, "within the noise"), (0.0, "within the noise")],
)
def test_a_loss_is_clear_if_it_exceeds_its_paired_error(mean: float, level: str) -> None:
    assert judged([shifted(mean)]) == [level]


def test_a_divergence_within_the_noise_floor_is_no_loss() -> None:
    assert judged([shifted(0.1, kl=0.0005, floor=0.001)]) == ["within the noise floor"]


def test_few_texts_do_not_make_a_clear_loss_the_same() -> None:
    """KL is above the floor everywhere, but varies so much that its lower bound is below it."""
    kl = np.full(GROUPS, 0.002)
    kl[0] = 0.002 * (GROUPS + 1)  # its bounds are on a log scale: mean 0.004, and low 0.7 of 0.002
    base, spread = np.full(GROUPS, -2.0), 0.01 * np.linspace(-1.7, 1.7, GROUPS)
    c = compared(base, base - 0.1 - spread, groups=np.arange(GROUPS), kl=kl, noise_kl=np.full(4, 0.0018))
    statistics = comparison_statistics(c)
    assert statistics["kl_mean_low"] < statistics["noise_floor_kl_mean"]
    assert judged([c]) == ["clearly worse"]


def test_more_candidates_need_more_evidence() -> None:
    """p is about 0.03 here: enough for one candidate, not for one of six."""
    alone = shifted(0.0035)
    assert judged([alone]) == ["clearly worse"]
    others = [shifted(0.0, name=f"other-{i}") for i in range(5)]
    assert judged([alone, *others])[0] == "within the noise"
    assert "6 candidates" in rule_words([alone, *others])


def test_few_groups_have_no_verdict() -> None:
    c = compared([-1.0, -2.0, -1.5], [-1.2, -2.5, -1.4], groups=[0, 1, 1])
    (found,) = verdicts([c], [comparison_statistics(c)])
    assert found.level == "not known"
    assert "too few groups for an error (2 documents, 5 are needed)" in found.sentence


def test_the_sentence_has_the_digits_of_the_table() -> None:
    c = shifted(0.1)
    (found,) = verdicts([c], [comparison_statistics(c)])
    assert found.sentence == "same first choice 100.0%, perplexity +10.52% ± 0.18%: clearly worse"


@pytest.mark.parametrize(
    ("rerun", "floor", "level"),
    [
        (1e-9, 1e-12, "more than the noise"),
        (0.5, 1e-12, "no more than the noise"),
        (1e-9, 0.5, "no more than the noise"),
        (None, 1e-12, "more than the noise"),
        (None, None, "not known"),
    ],
)
def test_a_path_differs_if_it_exceeds_all_noise_that_was_measured(
    rerun: float | None, floor: float | None, level: str
) -> None:
    again = {"rms": rerun, "largest": rerun, "targets": 5, "words": "2 windows, one at a time"}
    c = shifted(0.1, kl=0.01, floor=floor)
    path = replace(c, manifest={**c.manifest, "rerun": again})
    assert judged([path]) == [level]
    (said,) = verdicts([path], [comparison_statistics(path)])
    assert ("when computed again (2 windows, one at a time)" in said.sentence) == (rerun is not None)
    assert ("of prefill against itself" in said.sentence) == (floor is not None)
    assert rule_words([path]).startswith("more than the noise: the lower 95 % bound")
    few = replace(path, groups=np.zeros_like(path.groups))
    if level == "more than the noise":  # without an error, nobody knows
        assert judged([few]) == ["not known"]
