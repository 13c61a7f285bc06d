"""The chunked head against the definition, over shapes that are not a multiple of anything."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from scoremode.head.chunked import reduce_logits, score_rows
from scoremode.head.definition import Columns, define_columns, define_logits
from scoremode.head.matrix import Head, product_in_float32

SHAPES = [
    (0, 7, 11, 1),
    (1, 1, 2, 1),
    (1, 5, 1, 1),
    (3, 17, 257, 1),
    (13, 24, 1023, 3),
    (37, 48, 3001, 1),
    (5, 8, 515, 9),
]


def draw(n: int, d: int, v: int, k: int, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + d * 100 + v + k)
    hidden = torch.randn(n, d, generator=generator)
    weight = torch.randn(v, d, generator=generator) * spread / math.sqrt(d)
    return hidden, weight, torch.randint(0, v, (n, k), generator=generator)


def assert_same(ours: Columns, truth: Columns, tolerance: float) -> None:
    """Ranks and first choices exactly, the rest within the tolerance, in nats."""
    for name in ("logprob", "entropy", "top_logprob"):
        difference = (getattr(ours, name).double() - getattr(truth, name)).abs()
        assert difference.numel() == 0 or difference.nan_to_num(0.0).max() < tolerance, name
        assert torch.equal(getattr(ours, name).isnan(), getattr(truth, name).isnan()), name
    assert torch.equal(ours.rank, truth.rank)
    assert torch.equal(ours.top, truth.top)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 4096, 1 << 20])
def test_every_shape_and_budget_answers_to_the_definition(shape: tuple[int, int, int, int], budget: int) -> None:
    hidden, weight, targets = draw(*shape)
    head = Head(weight, vocabulary=len(weight))
    truth = define_columns(define_logits(hidden, weight), targets)
    assert_same(score_rows(hidden, head.logits, targets, len(weight), budget), truth, 2e-5)


def test_no_worse_than_the_naive_float32_computation() -> None:
    hidden, weight, targets = draw(64, 96, 2053, 1, spread=6.0)
    truth = define_columns(define_logits(hidden, weight), targets).logprob
    ours = score_rows(hidden, Head(weight, len(weight)).logits, targets, len(weight)).logprob
    naive = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets)
    assert (ours - truth).abs().max() <= 1.5 * (naive - truth).abs().max()


def test_bias_scale_cap_and_padded_vocabulary() -> None:
    hidden, weight, targets = draw(9, 20, 300, 2)
    bias = torch.linspace(-2, 2, 300)
    real = 271
    head = Head(weight, vocabulary=real, bias=bias, scale=0.7, softcap=5.0)
    truth = define_columns(define_logits(hidden, weight[:real], bias[:real], 0.7, 5.0), targets % real)
    assert_same(score_rows(hidden, head.logits, targets % real, real), truth, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_never_rounded_to_low_precision_logits(dtype: torch.dtype) -> None:
    hidden, weight, targets = draw(31, 64, 1500, 1)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    truth = define_columns(define_logits(hidden, weight), targets)
    ours = score_rows(hidden, Head(weight, 1500).logits, targets, 1500)
    rounded = define_columns(product_in_float32(hidden, weight).to(dtype), targets)
    assert (ours.logprob - truth.logprob).abs().max() < 2e-5
    assert (rounded.logprob - truth.logprob).abs().max() > 1e-3, "the check would not see a rounded head"


@pytest.mark.parametrize("fill", [1e4, -1e4, 0.0])
def test_extreme_and_equal_logits(fill: float) -> None:
    logits = torch.full((2, 700), fill)
    targets = torch.tensor([[0], [699]])
    assert_same(reduce_logits(logits, targets), define_columns(logits, targets), 1e-6)


def test_one_hot_rows_and_minus_infinity() -> None:
    logits = torch.full((3, 600), -math.inf)
    logits[0, 599] = 1.0
    logits[1, :2] = torch.tensor([5.0, 5.0])
    logits[2] = torch.linspace(-1e4, 1e4, 600)
    targets = torch.tensor([[599], [1], [0]])
    ours, truth = reduce_logits(logits, targets), define_columns(logits, targets)
    assert_same(ours, truth, 1e-3)
    assert ours.entropy[0] == 0
    assert ours.rank.tolist() == [[1], [2], [600]]


def test_nan_logits_stay_nan_and_are_not_ranked_away() -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7] = math.nan
    columns = reduce_logits(logits, torch.tensor([[0], [0]]))
    assert not columns.logprob[0].isnan().any()
    assert columns.logprob[1].isnan().all()


@pytest.mark.parametrize("k", [1, 3, 40])
def test_ties_are_ranked_by_id_for_few_and_for_many_targets(k: int) -> None:
    logits = torch.randint(0, 5, (6, 519), generator=torch.Generator().manual_seed(k)).float()
    targets = torch.randint(0, 519, (6, k), generator=torch.Generator().manual_seed(k + 1))
    assert torch.equal(reduce_logits(logits, targets).rank, define_columns(logits, targets).rank)
    first = reduce_logits(logits, targets).top
    assert torch.equal(first, define_columns(logits, targets).top)


def test_splitting_the_rows_changes_nothing_beyond_the_last_bits() -> None:
    hidden, weight, targets = draw(40, 32, 911, 1)
    head = Head(weight, 911)
    whole = score_rows(hidden, head.logits, targets, 911)
    for rows in (1, 7, 39):
        split = score_rows(hidden, head.logits, targets, 911, budget=rows * 4 * 911)
        assert (split.logprob - whole.logprob).abs().max() < 5e-6
        assert torch.equal(split.rank, whole.rank)
