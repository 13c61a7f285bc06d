"""The CPU kernels of the head against the definition: odd shapes, ties, shards, extreme logits, every dtype."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoremode.head import blocked
from scoremode.head.blocked import reduce_blocked
from scoremode.head.chunked import score_rows
from scoremode.head.columns import Columns, combine, define_columns, define_logits, finish
from scoremode.head.matrix import Head
from tests import rounding


@pytest.fixture(params=["as it is", "tiny blocks", "plain"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run everything again with small blocks, so that every shape has several of rows and of columns, and by the plain
    kernel. Blocks are made of few rows too."""
    if request.param == "plain":
        monkeypatch.setattr(sys.modules[__name__], "score", score_plainly)
    monkeypatch.setattr(blocked, "FEW_ROWS", -1)
    if request.param == "tiny blocks":
        monkeypatch.setattr(blocked, "CHUNK", 16)
        monkeypatch.setattr(blocked, "MOST_COLUMNS", 160)
        monkeypatch.setattr(blocked, "BLOCK_ROWS", 13)
    return str(request.param)


def draw(n: int, d: int, v: int, k: int, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + d * 100 + v + k)
    hidden = torch.randn(n, d, generator=generator)
    weight = torch.randn(v, d, generator=generator) * spread / math.sqrt(d)
    return hidden, weight, torch.randint(0, v, (n, k), generator=generator)


def few_bits(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers whose products float32 can add exactly, in any order."""
    return (hidden * 8).round() / 8, (weight * 16).round() / 16


def score(hidden: Tensor, head: Head, targets: Tensor) -> Columns:
    return finish(*reduce_blocked(hidden, head, targets))


def score_plainly(hidden: Tensor, head: Head, targets: Tensor) -> Columns:
    return score_rows(hidden, head.logits, targets, head.vocabulary, budget=4096)  # few rows at a time


@dataclass
class Recorder:
    """A ``Share`` that records its arguments and returns given answers."""

    calls: list[Tensor]
    answers: Iterator[Tensor] | None = None

    def __call__(self, at_target: Tensor) -> Tensor:
        self.calls.append(at_target.clone())
        return at_target if self.answers is None else next(self.answers)


def score_shards(hidden: Tensor, head: Head, targets: Tensor, cuts: list[int]) -> Columns:
    """As tensor-parallel ranks do: each has a slice of the matrix, and the targets' logits are exchanged first."""
    shards = [
        Head(head.weight[a:b], b - a, None if head.bias is None else head.bias[a:b], head.scale, head.softcap, a)
        for a, b in pairwise([0, *cuts, head.vocabulary])
    ]
    asked: list[list[Tensor]] = [[] for _ in shards]
    for shard, calls in zip(shards, asked, strict=True):
        reduce_blocked(hidden, shard, targets, Recorder(calls))
    assert len({tuple(len(at) for at in calls) for calls in asked}) == 1, "ranks must exchange equally often"
    everywhere = [torch.stack(call).amax(0) for call in zip(*asked, strict=True)]
    parts = []
    for shard in shards:
        part, at_target = reduce_blocked(hidden, shard, targets, Recorder([], iter(everywhere)))
        assert torch.equal(at_target, torch.cat(everywhere))
        parts.append(part)
    return finish(combine(parts), torch.cat(everywhere))


def assert_same(ours: Columns, truth: Columns, tolerance: float = 2e-5) -> None:
    """Ranks and first choices exactly, the rest within the tolerance in nats; infinite where the definition is."""
    for name in [name for name in Columns.__slots__ if name not in ("rank", "top")]:
        torch.testing.assert_close(getattr(ours, name).double(), getattr(truth, name), atol=tolerance, rtol=0)
    assert torch.equal(ours.rank, truth.rank)
    assert torch.equal(ours.top, truth.top)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("v", [1, 2, 3, 257, 1003, 2049])
@pytest.mark.parametrize("n", [0, 1, 5, 33])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_every_shape_answers_to_the_definition(n: int, v: int, k: int) -> None:
    """Hidden states and weights with few bits: every sum is exact in float32, so ranks must be exact too."""
    hidden, weight, targets = draw(n, 17, v, k)
    hidden, weight = few_bits(hidden, weight)
    assert_same(score(hidden, Head(weight, v), targets), define_columns(define_logits(hidden, weight), targets))


@pytest.mark.usefixtures("sizes")
def test_no_worse_than_the_naive_float32_computation_on_any_element() -> None:
    """The tolerance: one unit in the last place of the largest number that is rounded, |logit| + |log Σ|."""
    hidden, weight, targets = draw(65, 97, 2053, 3, spread=6.0)
    x = define_logits(hidden, weight)
    truth = define_columns(x, targets)
    naive = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets)
    ours = score(hidden, Head(weight, len(weight)), targets).logprob
    size = x.gather(1, targets).abs() + torch.logsumexp(x, 1).abs()[:, None]
    slack = 4 * torch.finfo(torch.float32).eps * size
    assert ((ours - truth.logprob).abs() <= (naive - truth.logprob).abs() + slack).all()
    assert (ours - truth.logprob).abs().max() <= 1.5 * (naive - truth.logprob).abs().max()


@pytest.mark.usefixtures("sizes")
def test_bias_scale_cap_and_padding() -> None:
    hidden, weight, targets = draw(19, 21, 300, 2)
    bias = torch.linspace(-2, 2, 300)
    weight[271:] = 100.0  # padding that would be the first choice everywhere
    head = Head(weight, 271, bias, scale=0.7, softcap=5.0)
    truth = define_columns(define_logits(hidden, weight[:271], bias[:271], 0.7, 5.0), targets % 271)
    assert_same(score(hidden, head, targets % 271), truth)
    assert not torch.allclose(score(hidden, Head(weight, 271), targets % 271).logprob.double(), truth.logprob, atol=0.1)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_dtype(dtype: torch.dtype) -> None:
    hidden, weight, targets = draw(31, 64, 1501, 1)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    truth = define_columns(define_logits(hidden, weight), targets)
    ours = score(hidden, Head(weight, 1501), targets)
    assert (ours.logprob - truth.logprob).abs().max() < 2e-5
    assert (ours.entropy - truth.entropy).abs().max() < 2e-5
    assert (ours.rank == truth.rank).float().mean() > 0.95  # two logits may be closer than float32 can resolve
    if dtype != torch.float64:
        rounded = define_columns((hidden.float() @ weight.float().T).to(dtype), targets)
        assert (rounded.logprob - truth.logprob).abs().max() > 1e-3, "the check would not see a rounded head"


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("fill", [1e4, -1e4, 0.0])
def test_equal_logits_of_any_size_rank_by_id(fill: float) -> None:
    v = 701
    head = Head(torch.zeros(v, 3), v, bias=torch.full((v,), fill))
    targets = torch.tensor([[0, 350], [700, 1]])
    ours = score(torch.ones(2, 3), head, targets)
    assert_same(ours, define_columns(torch.full((2, v), fill), targets), 2e-6)
    assert ours.rank.tolist() == [[1, 351], [701, 2]]
    assert ours.top.tolist() == [0, 0]


@pytest.mark.usefixtures("sizes")
def test_minus_infinity_counts_nothing() -> None:
    """A third of the ids is forbidden; one row has only a single id left, and one has two equal ones."""
    v = 600
    cases = []
    thirds = torch.randn(v, generator=torch.Generator().manual_seed(0))
    thirds[::3] = -math.inf
    thirds[: v // 2] = -math.inf  # whole blocks of forbidden ids at the beginning
    cases.append((thirds, [599, 301, 0]))
    one = torch.full((v,), -math.inf)
    one[599] = 1.0
    cases.append((one, [599, 0, 7]))
    two = torch.full((v,), -math.inf)
    two[:2] = 5.0
    cases.append((two, [1, 0, 599]))
    for bias, wanted in cases:
        targets = torch.tensor([wanted])
        ours = score(torch.ones(1, 2), Head(torch.zeros(v, 2), v, bias), targets)
        truth = define_columns(bias[None], targets)
        assert_same(ours, truth, 2e-6)
        shards = score_shards(torch.ones(1, 2), Head(torch.zeros(v, 2), v, bias), targets, [200, 200, 590])
        assert_same(shards, truth, 2e-6)
    assert ours.entropy.item() == pytest.approx(math.log(2))


@pytest.mark.usefixtures("sizes")
def test_nan_stays_nan_in_its_row_only() -> None:
    hidden, weight, targets = draw(9, 5, 300, 2)
    hidden[4, 2] = math.nan
    ours = score(hidden, Head(weight, 300), targets)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    for column in (ours.logprob, ours.entropy, ours.top_logprob):
        assert column[4].isnan().all()
        assert not column[others].isnan().any()
    assert int(ours.top[4]) in range(300)
    weight[7, 1] = math.nan
    assert score(hidden, Head(weight, 300), targets).logprob.isnan().all()


@pytest.mark.parametrize("d", [5, 64, 1025])
@pytest.mark.usefixtures("sizes")
def test_equal_weights_are_ties_wherever_they_lie(d: int) -> None:
    """Three ids in distant blocks have equal weights, of few bits: every order of adding gives the same logits."""
    v = 5003
    hidden, weight = few_bits(*draw(40, d, v, 1)[:2])
    same = [17, 2500, 5002]
    weight[same] = 4 * weight[17]
    targets = torch.tensor([same]).expand(40, 3)
    ours = score(hidden, Head(weight, v), targets)
    assert (ours.logprob == ours.logprob[:, :1]).all()
    truth = define_columns(define_logits(hidden, weight), targets)
    assert torch.equal(ours.rank, truth.rank)
    assert torch.equal(ours.top, truth.top)
    assert (ours.top == 17).any()


def test_ties_hold_for_shapes_that_the_kernel_cuts_along_the_depth() -> None:
    """512 rows at depth 1,024: here MKL adds in a different order for a different shape, and weights have all bits.

    Ranks are those of logits that differ from the definition by rounding alone.
    """
    v = 6007
    hidden, weight, _ = draw(512, 1024, v, 1)
    weight[6006] = weight[2900] = weight[1]
    targets = torch.tensor([[1], [2900], [6006]]).repeat(171, 1)[:512]
    whole = torch.tensor([[1, 2900, 6006]]).expand(512, 3)
    once, thrice = score(hidden, Head(weight, v), targets), score(hidden, Head(weight, v), whole)
    x = define_logits(hidden, weight)
    at, slack = x.gather(1, targets), rounding.of_sums(1024, float(x.abs().max()))
    assert ((x > at + slack).sum(1) < once.rank[:, 0]).all()
    assert ((x >= at - slack).sum(1) >= once.rank[:, 0]).all()
    columns = blocked._plan(whole, Head(weight, v), 1024, blocked.BLOCK_LOGITS, blocked.COPIED_WEIGHTS).columns
    alike = hidden @ weight[1].repeat(columns, 1).T
    if not torch.equal(alike, alike[:, :1].expand_as(alike)):
        pytest.skip("needs a library that adds in one order in all columns of a product")
    assert torch.equal(thrice.rank, thrice.rank[:, :1] + torch.tensor([[0, 1, 2]]))


@pytest.mark.usefixtures("sizes")
@settings(max_examples=40)
@given(st.data())
def test_any_cut_into_shards_gives_the_definition(data: st.DataObject) -> None:
    """Logits are small whole numbers, so that there are many ties and every bit is known; targets are at edges too."""
    v, n, k = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 9)), data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.lists(st.integers(0, v), max_size=4)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    hidden = torch.randint(-1, 2, (n, 3), generator=generator).float()
    weight = torch.randint(-2, 3, (v, 3), generator=generator).float()
    edges = [e for c in [0, *cuts, v] for e in (c - 1, c) if 0 <= e < v]
    ids = data.draw(st.lists(st.sampled_from([*edges, *range(v)]), min_size=n * k, max_size=n * k))
    targets = torch.tensor(ids, dtype=torch.int64).view(n, k)
    truth = define_columns(define_logits(hidden, weight), targets)
    head = Head(weight, v)
    assert_same(score_shards(hidden, head, targets, cuts), truth, 2e-6)
    assert_same(score(hidden, head, targets), truth, 2e-6)


def test_an_empty_slice_still_takes_part_in_the_exchange() -> None:
    called: list[tuple[int, ...]] = []

    def share(at: Tensor) -> Tensor:
        called.append(tuple(at.shape))
        assert at.isneginf().all()
        return at + 1

    hidden, weight, targets = draw(2060, 4, 8, 2)
    part, _ = reduce_blocked(hidden, Head(weight, 0, first_id=100), targets, share)
    assert called == [(687, 2), (687, 2), (686, 2)]
    assert part.largest.isneginf().all()
    assert not part.total.any()
    assert not part.before.any()
    called.clear()
    reduce_blocked(hidden[:0], Head(weight, 8, first_id=100), targets[:0], share)
    assert called == [(0, 2)]


def test_neither_the_inputs_nor_earlier_results_are_overwritten() -> None:
    hidden, weight, targets = draw(33, 8, 999, 1)
    before = hidden.clone(), weight.clone(), targets.clone()
    part, at_target = reduce_blocked(hidden, Head(weight, 999), targets)
    kept = [getattr(part, name).clone() for name in type(part).__slots__]
    reduce_blocked(-hidden, Head(weight, 999), targets)
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight, targets), strict=True))
    assert all(torch.equal(a, getattr(part, n)) for a, n in zip(kept, type(part).__slots__, strict=True))
    assert torch.equal(at_target, reduce_blocked(hidden, Head(weight, 999), targets)[1])


@pytest.mark.parametrize(("n", "d", "v", "k"), [(600, 576, 49152, 1), (300, 2048, 20011, 9), (64, 4096, 9000, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_stays_below_32_mib(n: int, d: int, v: int, k: int, dtype: torch.dtype) -> None:
    """The size of the buffers according to the plan, without running the product."""
    targets = torch.zeros(n, k, dtype=torch.int64)
    head = Head(torch.empty(v, d, dtype=dtype, device="meta"), v)
    rows = next(iter(blocked._row_blocks(targets, blocked.BLOCK_ROWS)))
    plan = blocked._plan(targets[rows], head, d, blocked.BLOCK_LOGITS, blocked.COPIED_WEIGHTS)
    m = len(targets[rows])
    product = scratch = m * plan.columns
    numbers = product + scratch + m * k * plan.columns + plan.columns * d + m * d + m * plan.chunk
    assert 4 * numbers < 32 << 20
    assert len(plan.blocks) * plan.columns < 1.1 * (v + m * k), "more is repeated than need be"
