"""The float64 definition, against numbers worked out by hand."""

from __future__ import annotations

import math

import torch

from scoremode.head.columns import define_columns, define_logits


def test_probabilities_one_half_one_quarter_one_quarter() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    c = define_columns(logits, torch.tensor([[0, 1, 2]]))
    assert torch.allclose(c.logprob, torch.tensor([[0.5, 0.25, 0.25]]).double().log(), atol=1e-7)
    assert math.isclose(c.entropy.item(), 1.5 * math.log(2), rel_tol=1e-7)
    assert c.top.item() == 0
    assert math.isclose(c.top_logprob.item(), math.log(0.5), rel_tol=1e-7)


def test_equal_logits_rank_by_id() -> None:
    """Rank 1 must mean "the first choice", or a uniform model would seem to be always right."""
    c = define_columns(torch.zeros(1, 4), torch.tensor([[0, 1, 2, 3]]))
    assert c.rank.tolist() == [[1, 2, 3, 4]]
    assert c.top.tolist() == [0]


def test_a_logit_of_minus_infinity_adds_nothing_to_the_entropy() -> None:
    c = define_columns(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([[2]]))
    assert math.isclose(c.entropy.item(), math.log(2))
    assert c.logprob.item() == -math.inf
    assert c.rank.item() == 3


def test_bias_scale_and_cap_are_applied_in_that_order() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])
    x = define_logits(hidden, weight, bias=torch.tensor([1.0, -1.0]), scale=0.5, softcap=2.0)
    assert torch.allclose(x, torch.tensor([[2 * math.tanh(1.5 / 2), 2 * math.tanh(1.0 / 2)]]).double())
