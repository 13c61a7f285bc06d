"""The 95 % bounds hold about 95 times in 100, on real scores, from 5 groups on."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from scoremode.statistics.groups import STRETCH

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "coverage.py"))
GROUPS, NUMBERS, read = SCRIPT["GROUPS"], SCRIPT["NUMBERS"], SCRIPT["read"]
neighbours, of_documents, of_stretches = (SCRIPT[name] for name in ("neighbours", "of_documents", "of_stretches"))
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
