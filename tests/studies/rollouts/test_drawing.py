"""Draws from logits, against longhand in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scoremode.errors import EngineError
from scoremode.studies.rollouts.engines.writers import draw, filtered
from scoremode.studies.rollouts.writing import DrawingRules

RULES = [
    *(DrawingRules(1.0), DrawingRules(0.7), DrawingRules(1.3, top_k=5), DrawingRules(1.0, top_p=0.6)),
    *(DrawingRules(0.9, min_p=0.1), DrawingRules(0.8, top_p=0.8, top_k=7, min_p=0.02), DrawingRules(1.0, top_k=1000)),
    DrawingRules(2.0, top_p=1e-9),
]


def kept_longhand(x: list[float], rules: DrawingRules) -> set[int]:
    """The ids that stay, by the words of each rule."""
    scaled = {i: value / rules.temperature for i, value in enumerate(x)}
    if rules.min_p:
        scaled = {i: v for i, v in scaled.items() if math.exp(v - max(scaled.values())) >= rules.min_p}
    if rules.top_k and rules.top_k < len(x):
        floor = sorted(scaled.values(), reverse=True)[: rules.top_k][-1]
        scaled = {i: v for i, v in scaled.items() if v >= floor}
    if rules.top_p < 1:
        total, before, stay = sum(math.exp(v) for v in scaled.values()), 0.0, {}
        for i, v in sorted(scaled.items(), key=lambda item: (-item[1], item[0])):
            if before / total < rules.top_p:
                stay[i] = v
            before += math.exp(v)
        scaled = stay
    return set(scaled)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_filters_and_log_probabilities_are_those_of_longhand(rules: DrawingRules) -> None:
    numbers = np.random.default_rng(3)
    x = numbers.normal(0, 2, (40, 311)).astype(np.float32)
    kept = filtered(torch.from_numpy(x).double() / rules.temperature, rules)
    for row in range(len(x)):
        assert set(torch.isfinite(kept[row]).nonzero()[:, 0].tolist()) == kept_longhand(x[row].tolist(), rules)
    ids, logprob, raw = draw(torch.from_numpy(x), rules, numbers.random(len(x)))
    for row, token in enumerate(ids.tolist()):
        stay = kept_longhand(x[row].tolist(), rules)
        wide = x[row].astype(np.float64)
        assert token in stay
        assert raw[row] == pytest.approx(wide[token] - np.log(np.exp(wide).sum()), abs=1e-12)
        own = np.exp(wide[sorted(stay)] / rules.temperature).sum()
        assert logprob[row] == pytest.approx(wide[token] / rules.temperature - np.log(own), abs=1e-12)


def test_greedy_choices_are_the_first_of_the_largest() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    ids, logprob, raw = draw(x, DrawingRules(), np.zeros(2))
    assert ids.tolist() == [1, 0]
    assert logprob.tolist() == [0, 0]
    assert raw == pytest.approx([-math.log(2 + math.exp(-2)), -math.log(3)])


def test_the_ends_of_the_uniform_numbers_never_choose_an_impossible_token() -> None:
    with np.errstate(divide="ignore"):
        x = torch.from_numpy(np.log(np.array([0.0, 0.1, 0.2, 0.7, 0.0])))[None].expand(2, -1)
    ids, _, _ = draw(x, DrawingRules(1.0), np.array([0.0, 1.0]))
    assert ids[0] == 1
    assert ids[1] == 3


def test_nan_is_refused() -> None:
    for rules in (DrawingRules(), DrawingRules(1.0)):
        with pytest.raises(EngineError, match="NaN"):
            draw(torch.full((1, 5), math.nan), rules, np.zeros(1))
