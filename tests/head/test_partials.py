"""Slices of a vocabulary combine to the definition, wherever it is divided."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.scores.answers import measured
from scoremode.head import columns as P
from scoremode.head.columns import Columns, define_columns
from scoremode.head.divergence import divergence_partials, gather_own


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


def test_minus_infinity_is_no_probability_and_nan_is_nan() -> None:
    x, targets = logits(8, 600, 1)
    x[:, ::3] = float("-inf")
    got = by_slices(x, targets, [200])
    wanted = define_columns(x, targets)
    torch.testing.assert_close(got.entropy.double(), wanted.entropy, atol=1e-5, rtol=0)
    assert torch.equal(torch.isinf(got.logprob), torch.isinf(wanted.logprob))
    x[3, 500] = float("nan")
    got = by_slices(x, targets, [200])
    assert torch.isnan(got.logprob[3]).all()
    assert not torch.isnan(got.logprob[4]).any()


def test_words_keep_every_bit() -> None:
    from scoremode.core.scores.packing import read_lines

    pooler = pytest.importorskip("scoremode.engines.vllm.pooler")
    x, targets = logits(9, 50, 2)
    columns = define_columns(x, targets)
    large = torch.full_like(columns.rank, (1 << 24) + 1)
    answers = read_lines(
        pooler.to_words(
            type(columns)(columns.logprob, large, columns.entropy, columns.top, columns.top_logprob)
        ).numpy(),
        2,
    )
    assert np.array_equal(measured(answers.rank), large.numpy())
    assert np.array_equal(answers.logprob.astype(np.float32), columns.logprob.float().numpy())
    assert np.array_equal(measured(answers.top), columns.top.numpy())


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
