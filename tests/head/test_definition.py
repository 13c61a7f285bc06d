"""The float64 definition against numbers worked out by hand, and slices of a vocabulary against it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.head import columns as P
from scoremode.head.columns import Columns, define_columns, define_logits
from scoremode.head.divergence import divergence_partials, gather_own


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


def logits(n: int, v: int, k: int, seed: int = 0, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, v, generator=g) * 5
    if ties:
        x = x.round()
    return x, torch.randint(0, v, (n, k), generator=g)


def by_slices(x: torch.Tensor, targets: torch.Tensor, cuts: list[int], reduce: Any = P.partials) -> Columns:
    edges = [0, *cuts, x.shape[1]]
    slices = [x[:, a:b].clone() for a, b in pairwise(edges)]
    at = torch.stack([P.target_logits(s, targets, a) for s, a in zip(slices, edges, strict=False)]).amax(0)
    parts = [reduce(s, targets, at, a) for s, a in zip(slices, edges, strict=False)]
    return P.finish(P.combine(parts), at)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("v", [1, 2, 255, 256, 1003, 4099])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("reduce", [P.partials, P._on_device])
def test_any_cut_gives_the_definition(v: int, k: int, ties: bool, reduce: Any) -> None:
    x, targets = logits(37, v, k, ties=ties)
    wanted = define_columns(x, targets)
    for cuts in ([], [v // 2], [v // 4, v // 2, v - v // 4], [v]):
        if reduce is P._on_device and 0 in np.diff([0, *cuts, v]):
            continue  # partials() keeps empty slices away from it
        got = by_slices(x, targets, cuts, reduce)
        torch.testing.assert_close(got.logprob.double(), wanted.logprob, atol=2e-5, rtol=0)
        torch.testing.assert_close(got.entropy.double(), wanted.entropy, atol=2e-5, rtol=0)
        torch.testing.assert_close(got.top_logprob.double(), wanted.top_logprob, atol=2e-5, rtol=0)
        assert torch.equal(got.rank, wanted.rank)
        assert torch.equal(got.top, wanted.top)


@pytest.mark.parametrize(("n", "k"), [(0, 1), (1, 1), (2, 1), (37, 3)])
@pytest.mark.parametrize("whole", [False, True])
def test_words_between_ranks_bring_every_field_bit_for_bit(n: int, k: int, whole: bool) -> None:
    x, targets = logits(n, 97, k)
    at, gather = P.target_logits(x, targets), gather_own if whole else None
    for own in (P.partials(x.clone(), targets, at), divergence_partials(x + 1, x.clone(), targets, at, gather=gather)):
        words = own.to_words()
        assert words.dtype == torch.float32
        found = own.like_from_words(words)
        for ours, theirs in zip(leaves(found), leaves(own), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def leaves(block: P.RowBlock) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for field in block._fields():
        found += leaves(field) if isinstance(field, P.RowBlock) else [] if field is None else [field]
    return found
