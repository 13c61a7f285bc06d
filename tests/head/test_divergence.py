"""Divergence: the definition by hand, the slices against it, and both ways of the head that need no GPU."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoremode.head import blocked
from scoremode.head.blocked import diverge_blocked
from scoremode.head.chunked import diverge_in_chunks
from scoremode.head.definition import define_logits
from scoremode.head.divergence import (
    Divergence,
    combine_divergence,
    define_divergence,
    divergence_partials,
    finish_divergence,
)
from scoremode.head.kernels import Diverge
from scoremode.head.matrix import Head
from scoremode.head.partials import target_logits

WAYS: list[Diverge] = [diverge_blocked, diverge_in_chunks]


@pytest.fixture(params=["as it is", "tiny blocks"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiny blocks":
        monkeypatch.setattr(blocked, "CHUNK", 16)
        monkeypatch.setattr(blocked, "COLUMNS", 160)
        monkeypatch.setattr(blocked, "ROWS", 26)  # half of it together: 13


def draw(n: int, d: int, v: int, k: int, noise: float = 0.05) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the weights of p, those of q (nearly the same), and targets."""
    generator = torch.Generator().manual_seed(n * 1000 + d * 100 + v + k)
    hidden = torch.randn(n, d, generator=generator)
    weight = torch.randn(v, d, generator=generator) * 3 / math.sqrt(d)
    other = weight + noise * torch.randn(v, d, generator=generator) / math.sqrt(d)
    return hidden, weight, other, torch.randint(0, v, (n, k), generator=generator)


def of_logits(p: Tensor, q: Tensor, targets: Tensor, cuts: list[int]) -> Divergence:
    """The divergence of logits that exist already, slice by slice."""
    edges = list(pairwise([0, *cuts, p.shape[1]]))
    at_p, at_q = (torch.stack([target_logits(x[:, a:b], targets, a) for a, b in edges]).amax(0) for x in (p, q))
    parts = [divergence_partials(p[:, a:b], q[:, a:b], targets, at_p, at_q, a) for a, b in edges]
    return finish_divergence(combine_divergence(parts), at_p, at_q)


def by_shards(way: Diverge, hidden: Tensor, heads: tuple[Head, Head], targets: Tensor, cuts: list[int]) -> Divergence:
    """As ranks would: the targets' logits come from the whole heads, and each slice is reduced by itself."""
    p, q = heads
    _, at_p, at_q = way(hidden, p, hidden, q, targets)
    parts = []
    for a, b in pairwise([0, *cuts, p.vocabulary]):
        slices = [Head(x.weight[a:b], b - a, None if x.bias is None else x.bias[a:b], first_id=a) for x in (p, q)]
        calls: list[int] = []

        def share(at: Tensor, calls: list[int] = calls) -> Tensor:
            side, begin = (at_p, at_q)[len(calls) % 2], sum(calls) // 2 if len(calls) % 2 == 0 else sum(calls[:-1]) // 2
            calls.append(len(at))
            return side[begin : begin + len(at)]

        part, got_p, got_q = way(hidden, slices[0], hidden, slices[1], targets, share)
        assert torch.equal(got_p, at_p)
        assert torch.equal(got_q, at_q)
        parts.append(part)
    return finish_divergence(combine_divergence(parts), at_p, at_q)


def biased(logits: Tensor) -> Head:
    """A head whose logits are given numbers, exactly."""
    return Head(torch.zeros(len(logits), 1), len(logits), bias=logits.float())


def kl_of(way: Diverge, p: Tensor, q: Tensor) -> float:
    """KL of two lists of logits."""
    one = torch.ones(1, 1)
    whole = way(one, biased(p), one, biased(q), torch.zeros(1, 1, dtype=torch.int64))
    return finish_divergence(*whole).kl.item()


def test_the_definition_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    wanted = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert define_divergence(p, q, torch.tensor([[0]])).kl.item() == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_closed_forms(way: Diverge) -> None:
    half = torch.tensor([0.5, 0.25, 0.25]).log()
    mirrored = half.flip(0)
    assert kl_of(way, half, mirrored) == pytest.approx(0.25 * math.log(2), abs=1e-7)
    uniform = torch.zeros(1000)
    peaked = torch.zeros(1000)
    peaked[999] = math.log(1000)  # p of the last id: 1000 / 1999
    assert kl_of(way, uniform, peaked) == pytest.approx(math.log(1.999) - math.log(1000) / 1000, abs=1e-6)
    weight = 1000 / 1999
    assert kl_of(way, peaked, uniform) == pytest.approx(weight * math.log(1000) - math.log(1.999), abs=1e-6)
    sure = torch.full((1000,), -math.inf)
    sure[3] = 0.0
    assert kl_of(way, sure, uniform) == pytest.approx(math.log(1000), abs=1e-6)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", [[0], [599], [0, 300, 599]])
def test_infinite_where_q_is_nothing_and_p_is_not(way: Diverge, ids: list[int]) -> None:
    full, holed = torch.zeros(600), torch.zeros(600)
    holed[ids] = -math.inf
    assert kl_of(way, full, holed) == math.inf
    assert kl_of(way, holed, full) == pytest.approx(math.log(600 / (600 - len(ids))), abs=1e-6)
    assert kl_of(way, holed, holed) == 0


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
def test_whole_blocks_of_nothing_on_either_side(way: Diverge) -> None:
    p, q = torch.full((900,), -math.inf), torch.full((900,), -math.inf)
    p[500:] = torch.linspace(-1, 1, 400)
    q[400:] = torch.linspace(1, -1, 500)
    truth = define_divergence(p[None], q[None], torch.tensor([[0]])).kl.item()
    assert kl_of(way, p, q) == pytest.approx(truth, rel=1e-6)
    assert kl_of(way, q, p) == math.inf


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("v", [1, 2, 3, 257, 1003])
@pytest.mark.parametrize(("n", "k"), [(0, 1), (1, 9), (33, 3)])
def test_every_shape_answers_to_the_definition(way: Diverge, n: int, v: int, k: int) -> None:
    """Few bits, so that the float32 products are exact: what is left are the reductions, and those are in float64."""
    hidden, weight, other, targets = draw(n, 17, v, k, noise=0.5)
    hidden, weight, other = (hidden * 8).round() / 8, (weight * 16).round() / 16, (other * 16).round() / 16
    ours = finish_divergence(*way(hidden, Head(weight, v), hidden, Head(other, v), targets))
    truth = define_divergence(define_logits(hidden, weight), define_logits(hidden, other), targets)
    torch.testing.assert_close(ours.kl, truth.kl, atol=1e-12, rtol=1e-9)
    for side, wanted in ((ours.p, truth.p), (ours.q, truth.q)):
        torch.testing.assert_close(side.logprob.double(), wanted.logprob, atol=5e-6, rtol=0)
        torch.testing.assert_close(side.entropy.double(), wanted.entropy, atol=5e-6, rtol=0)
        assert torch.equal(side.rank, wanted.rank)
        assert torch.equal(side.top, wanted.top)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_and_itself(way: Diverge) -> None:
    hidden, weight, _, targets = draw(40, 33, 1999, 1)
    head = Head(weight, 1999)
    assert (finish_divergence(*way(hidden, head, hidden, head, targets)).kl == 0).all()
    assert (by_shards(way, hidden, (head, head), targets, [0, 700, 1998]).kl == 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_tiny_divergences_are_seen_and_none_is_negative(way: Diverge) -> None:
    """q is p but for the last bits. Sums in float32 would be off by more than the divergence itself."""
    hidden, weight, other, targets = draw(64, 24, 2003, 1, noise=1e-3)
    hidden, weight = (hidden * 8).round() / 8, (weight * 64).round() / 64
    other = weight + ((other - weight).sign() / 2**12)
    ours = finish_divergence(*way(hidden, Head(weight, 2003), hidden, Head(other, 2003), targets)).kl
    truth = define_divergence(define_logits(hidden, weight), define_logits(hidden, other), targets).kl
    assert truth.max() < 5e-6
    assert (ours > 0).all()
    torch.testing.assert_close(ours, truth, atol=0, rtol=1e-4)
    log_p, log_q = (torch.log_softmax(hidden @ w.T, 1) for w in (weight, other))
    naive = (log_p.exp() * (log_p - log_q)).sum(1)
    assert ((naive - truth) / truth).abs().max() > 1e-2, "the check would not see sums in float32"


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
def test_two_heads_of_different_depth_dtype_and_shape(way: Diverge) -> None:
    hidden_p, weight_p, _, targets = draw(21, 17, 523, 2)
    hidden_q, weight_q, _, _ = draw(21, 40, 523, 2)
    head_p = Head(weight_p.bfloat16(), 500, bias=torch.linspace(-1, 1, 523), softcap=6.0)
    head_q = Head(weight_q.half(), 500, scale=0.5)
    targets = targets % 500
    ours = finish_divergence(*way(hidden_p, head_p, hidden_q, head_q, targets))
    x_p = define_logits(hidden_p, head_p.weight[:500], torch.linspace(-1, 1, 523)[:500], softcap=6.0)
    truth = define_divergence(x_p, define_logits(hidden_q, head_q.weight[:500], scale=0.5), targets)
    torch.testing.assert_close(ours.kl, truth.kl, atol=5e-6, rtol=0)
    torch.testing.assert_close(ours.q.logprob.double(), truth.q.logprob, atol=5e-6, rtol=0)
    assert truth.kl.min() > 0.1


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cuts", [[500], [1, 2], [0, 333, 333, 1002], [1003]])
def test_any_shards_give_the_definition(way: Diverge, cuts: list[int]) -> None:
    hidden, weight, other, targets = draw(30, 17, 1003, 3, noise=0.5)
    hidden, weight, other = (hidden * 8).round() / 8, (weight * 16).round() / 16, (other * 16).round() / 16
    targets[0] = torch.tensor([cuts[0] % 1003, (cuts[0] - 1) % 1003, 1002])
    ours = by_shards(way, hidden, (Head(weight, 1003), Head(other, 1003)), targets, cuts)
    truth = define_divergence(define_logits(hidden, weight), define_logits(hidden, other), targets)
    torch.testing.assert_close(ours.kl, truth.kl, atol=1e-12, rtol=1e-9)
    assert torch.equal(ours.p.rank, truth.p.rank)
    assert torch.equal(ours.q.rank, truth.q.rank)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices_of_logits_add_up(data: st.DataObject) -> None:
    """Whole-number logits with holes, cut anywhere: finite and infinite divergences alike."""
    v = data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, v), max_size=3)))
    number = st.one_of(st.integers(-6, 6).map(float), st.just(-math.inf))
    rows = st.lists(number, min_size=v, max_size=v).filter(lambda row: max(row) > -math.inf)
    p, q = torch.tensor([data.draw(rows)]), torch.tensor([data.draw(rows)])
    targets = torch.tensor([[data.draw(st.integers(0, v - 1))]])
    ours, truth = of_logits(p, q, targets, cuts), define_divergence(p, q, targets)
    torch.testing.assert_close(ours.kl, truth.kl, atol=1e-12, rtol=1e-9)
    assert torch.equal(ours.p.rank, truth.p.rank)
    assert ours.kl.item() >= 0


def test_the_workspace_of_a_divergence_stays_below_32_mib() -> None:
    for n, d, v, k in ((600, 576, 49152, 1), (300, 2048, 20011, 9), (64, 8192, 9000, 40)):
        targets = torch.zeros(n, k, dtype=torch.int64)
        rows = next(iter(blocked._row_blocks(targets, blocked.ROWS // 2)))
        m = len(targets[rows])
        head = Head(torch.empty(v, d, device="meta"), v)
        columns = blocked._plan(targets[rows], head, d, blocked.BLOCK_OF_TWO, blocked.COPIED_OF_TWO).columns
        singles = 2 * (2 * m * columns + m * k * columns + columns * d + m * d)
        doubles = 2 * 2 * m * columns
        assert 4 * singles + 8 * doubles < 32 << 20


def test_ranks_whose_stored_slices_differ_exchange_equally_often() -> None:
    """The model's own head is padded alike on every rank; a baseline's slice has its real ids only."""
    hidden, weight, other, targets = draw(40, 8, 500, 1)
    exchanged = []
    for real in (500, 20):
        calls: list[int] = []

        def share(at: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(len(at))
            return at

        p, q = Head(weight[:real], real), Head(other, real)
        part, _, _ = diverge_in_chunks(hidden, p, hidden, q, targets % real, share, budget=4 * 500 * 3)
        assert len(part.p.largest) == 40
        exchanged.append(calls)
    assert len(exchanged[0]) > 2
    assert exchanged[0] == exchanged[1]
