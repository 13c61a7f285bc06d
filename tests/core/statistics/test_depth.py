"""Means by depth in the window, against sums that are written out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.depth import depth_edges
from scoremode.reports.comparisons import depth_blocks
from tests.command_line import Command

WORDS = "the cat sat on the mat and the dog ran away from it over a hill "


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> sm.Comparison:
    """Seven documents of different lengths in windows of 300 tokens."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n}{WORDS * (4 + n)}"}) + "\n" for n in range(7)))
    made = sm.compare("table:uniform", "table:uniform", corpus=str(file), context_length=300, stride=300)[0]
    random, n = np.random.default_rng(1), len(made.groups)
    scores = replace(made.candidate.scores, logprob=np.array(-random.exponential(2.0, n)))
    return replace(
        made, divergences=Divergences(kl=random.exponential(0.1, n)), candidate=replace(made.candidate, scores=scores)
    )


def test_stretches_double() -> None:
    assert depth_edges(131071).tolist() == [0, *(64 << n for n in range(12))]
    assert depth_edges(64).tolist() == [0, 64, 65]
    assert depth_edges(63).tolist() == [0, 64]


def test_means_are_those_of_the_targets_at_that_depth(compared: sm.Comparison) -> None:
    window, token = np.array(compared.baseline.facts.window), np.array(compared.baseline.facts.token)
    first = {int(w): int(token[window == w].min()) for w in set(window.tolist())}
    at = token - np.array([first[int(w)] for w in window])
    kl, moved = measured(compared.kl), compared.candidate.scores.logprob - compared.baseline.scores.logprob
    found = compared.by_depth()
    assert [(row.first, row.last) for row in found] == [(0, 63), (64, 127), (128, 255), (256, 298)]
    for row in found:
        here = (at >= row.first) & (at <= row.last)
        assert row.kl is not None
        assert (row.delta_logprob.n, row.unbounded) == (int(here.sum()), 0)
        assert row.kl.value == pytest.approx(kl[here].mean(), rel=1e-12)
        assert row.delta_logprob.value == pytest.approx(moved[here].mean(), rel=1e-12)
        groups = np.array(compared.groups)[here]
        assert row.kl.groups == len(set(groups.tolist()))
        sizes = np.array([(groups == g).sum() for g in sorted(set(groups.tolist()))])
        rests = np.array([(kl[here][groups == g] - row.kl.value).sum() for g in sorted(set(groups.tolist()))])
        if len(sizes) >= 5:
            assert row.kl.stderr == pytest.approx(
                np.sqrt((rests**2 / (1 - sizes / sizes.sum())).sum()) / sizes.sum(), rel=1e-6
            )
        else:
            assert row.kl.stderr is None


def test_values_that_are_not_finite_are_counted(compared: sm.Comparison) -> None:
    kl = np.array(measured(compared.kl))
    kl[5] = np.inf
    found = replace(compared, divergences=Divergences(kl=kl))
    assert [row.unbounded for row in found.by_depth()] == [1, 0, 0, 0]
    assert any("1 value is not finite and left out" in str(part) for part in depth_blocks([found]))
    assert found.by_depth()[0].as_json()["unbounded"] == 1


def test_the_command_prints_depths_if_it_is_asked(command: Command) -> None:
    asked = ("compare", "table:uniform", "table:uniform", "--text", WORDS * 9, "--context-length", 200)
    table = command(*asked, "--stride", 200, "--by-depth")
    assert "KL mean by depth in the window" in table.out
    assert "64 to 127" in table.out
    assert "by depth" not in command(*asked).out
    rows = command(*asked, "--stride", 200, "--by-depth", "--json").json["candidates"][0]["by_depth"]
    assert [row["first"] for row in rows] == [0, 64, 128]
    assert all(row["kl_mean"] == 0 and row["kl_mean_stderr"] is None for row in rows)  # one document
    assert "by_depth" not in command(*asked, "--json").json["candidates"][0]
