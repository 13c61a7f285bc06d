"""Divergence: the definition by hand, the slices against it, and the two kernels that need no GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoremode.head import blocked, budget, divergence
from scoremode.head.blocked import diverge_blocked
from scoremode.head.chunked import diverge_from_logits, diverge_in_chunks, score_rows
from scoremode.head.columns import Columns, define_logits, target_logits
from scoremode.head.divergence import (
    Divergence,
    combine_divergence,
    define_divergence,
    divergence_partials,
    finish_divergence,
)
from scoremode.head.kernels import Diverge, _kernel
from scoremode.head.matrix import Head

WAYS: list[Diverge] = [diverge_blocked, diverge_in_chunks]


@pytest.fixture(params=["as it is", "tiny blocks"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiny blocks":
        monkeypatch.setattr(blocked, "FEW_ROWS", -1)
        monkeypatch.setattr(blocked, "CHUNK", 16)
        monkeypatch.setattr(blocked, "MOST_COLUMNS", 160)
        monkeypatch.setattr(blocked, "BLOCK_ROWS", 26)  # half of it together: 13


def draw(n: int, d: int, v: int, k: int, noise: float = 0.05) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the weights of p, those of q (nearly the same), and targets."""
    generator = torch.Generator().manual_seed(n * 1000 + d * 100 + v + k)
    hidden = torch.randn(n, d, generator=generator)
    weight = torch.randn(v, d, generator=generator) * 3 / math.sqrt(d)
    other = weight + noise * torch.randn(v, d, generator=generator) / math.sqrt(d)
    return hidden, weight, other, torch.randint(0, v, (n, k), generator=generator)


def of_logits(p: Tensor, q: Tensor, targets: Tensor, cuts: list[int]) -> Divergence:
    """The divergence of given logits, slice by slice."""
    edges = list(pairwise([0, *cuts, p.shape[1]]))
    at_q = torch.stack([target_logits(q[:, a:b], targets, a) for a, b in edges]).amax(0)
    parts = [divergence_partials(p[:, a:b], q[:, a:b], targets, at_q, a) for a, b in edges]
    return finish_divergence(combine_divergence(parts), at_q)


def by_shards(way: Diverge, hidden: Tensor, heads: tuple[Head, Head], targets: Tensor, cuts: list[int]) -> Divergence:
    """As tensor-parallel ranks do: the targets' logits come from the whole heads; each slice is reduced separately."""
    p, q = heads
    _, at_q = way(hidden, p, hidden, q, targets)
    parts = []
    for a, b in pairwise([0, *cuts, p.vocabulary]):
        slices = [Head(x.weight[a:b], b - a, None if x.bias is None else x.bias[a:b], first_id=a) for x in (p, q)]
        calls: list[int] = []

        def share(at: Tensor, calls: list[int] = calls) -> Tensor:
            begin = sum(calls)
            calls.append(len(at))
            return at_q[begin : begin + len(at)]

        part, got_q = way(hidden, slices[0], hidden, slices[1], targets, share)
        assert torch.equal(got_q, at_q)
        parts.append(part)
    return finish_divergence(combine_divergence(parts), at_q)


def biased(logits: Tensor) -> Head:
    """A head whose logits are exactly the given numbers."""
    return Head(torch.zeros(len(logits), 1), len(logits), bias=logits.float())


def kl_of(way: Diverge, p: Tensor, q: Tensor) -> float:
    """KL of two lists of logits."""
    one = torch.ones(1, 1)
    whole = way(one, biased(p), one, biased(q), torch.zeros(1, 1, dtype=torch.int64))
    return finish_divergence(*whole).kl.item()


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
@pytest.mark.parametrize("v", [1, 2, 3, 257, 1003])
@pytest.mark.parametrize(("n", "k"), [(0, 1), (1, 9), (33, 3)])
def test_every_shape_answers_to_the_definition(way: Diverge, n: int, v: int, k: int) -> None:
    """Few bits, so that float32 products are exact: only the reductions remain, and they are in float64."""
    hidden, weight, other, targets = draw(n, 17, v, k, noise=0.5)
    hidden, weight, other = (hidden * 8).round() / 8, (weight * 16).round() / 16, (other * 16).round() / 16
    ours = finish_divergence(*way(hidden, Head(weight, v), hidden, Head(other, v), targets))
    truth = define_divergence(define_logits(hidden, weight), define_logits(hidden, other), targets)
    torch.testing.assert_close(ours.kl, truth.kl, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(ours.q.logprob.double(), truth.q.logprob, atol=5e-6, rtol=0)
    torch.testing.assert_close(ours.q.entropy.double(), truth.q.entropy, atol=5e-6, rtol=0)
    assert torch.equal(ours.q.rank, truth.q.rank)
    assert torch.equal(ours.q.top, truth.q.top)


@pytest.mark.parametrize("way", WAYS)
def test_tiny_divergences_are_seen_and_none_is_negative(way: Diverge) -> None:
    """q equals p except in the last bits. Sums in float32 would have a larger error than the divergence itself."""
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
    assert torch.equal(ours.q.rank, truth.q.rank)


@settings(max_examples=60)
@given(st.data())
def test_slices_of_logits_add_up(data: st.DataObject) -> None:
    """Whole-number logits with forbidden ids, divided anywhere: both finite and infinite divergences."""
    v = data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, v), max_size=3)))
    number = st.one_of(st.integers(-6, 6).map(float), st.just(-math.inf))
    rows = st.lists(number, min_size=v, max_size=v).filter(lambda row: max(row) > -math.inf)
    p, q = torch.tensor([data.draw(rows)]), torch.tensor([data.draw(rows)])
    targets = torch.tensor([[data.draw(st.integers(0, v - 1))]])
    ours, truth = of_logits(p, q, targets, cuts), define_divergence(p, q, targets)
    torch.testing.assert_close(ours.kl, truth.kl, atol=1e-12, rtol=1e-9)
    assert torch.equal(ours.q.rank, truth.q.rank)
    assert ours.kl.item() >= 0


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", ["blocked", "plain"])
@pytest.mark.parametrize(
    ("n", "d", "v", "k"), [(1, 8, 300, 1), (129, 24, 2003, 1), (700, 17, 1003, 2), (33, 24, 2003, 9)]
)
def test_scores_beside_a_divergence_are_the_bits_of_scores_alone(way: str, n: int, d: int, v: int, k: int) -> None:
    """Otherwise a model could differ from itself, because its baseline is scored alone."""
    hidden, weight, other, targets = draw(n, d, v, k)
    p, q, kernel = Head(weight, v), Head(other, v, bias=torch.linspace(-1, 1, v)), _kernel(way)
    beside, alone = kernel.divergence(hidden, p, hidden, q, targets).q, kernel.score(hidden, q, targets)
    for name in Columns.__slots__:
        assert torch.equal(getattr(beside, name), getattr(alone, name)), name


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", ["blocked", "plain"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shape", [(0, 8, 300, 1), (33, 24, 2003, 9), (300, 17, 1003, 2)])
def test_kept_logits_change_no_bit(way: str, whole: bool, shape: tuple[int, int, int, int]) -> None:
    """Several candidates in turn: the logits of p are computed for the first one alone."""
    n, _, v, _ = shape
    hidden, weight, other, targets = draw(*shape)
    p, kernel, kept = Head(weight, v), _kernel(way), dict[tuple[int, ...], Tensor]()
    first: list[Tensor] = []
    for q in (Head(other, v), Head(other.flip(0), v, bias=torch.linspace(-1, 1, v)), Head(other, v)):
        found = kernel.divergence(hidden, p, hidden, q, targets, whole, kept)
        alone = kernel.divergence(hidden, p, hidden, q, targets, whole)
        assert torch.equal(found.kl, alone.kl)
        assert torch.equal(found.q.logprob, alone.q.logprob)
        if alone.kl_reverse is not None and found.kl_reverse is not None:
            assert torch.equal(found.kl_reverse, alone.kl_reverse)
        first = first or list(kept.values())
        assert all(block is again for block, again in zip(first, kept.values(), strict=True))
    assert sum(block.numel() for block in kept.values()) >= n * v
    assert (found.kl_reverse is not None) == whole


def test_scores_from_logits_beside_a_divergence_are_the_bits_of_scores_alone() -> None:
    """As with a quantized head: more rows than one chunk, logits in bfloat16, padding after them."""
    hidden, weight, other, targets = draw(300, 24, 2003, 1)
    padded = torch.cat([other, torch.ones(61, 24)])

    def served(rows: Tensor) -> Tensor:
        return (rows @ padded.T).bfloat16()

    budget = 4 * 2003 * 77
    beside = diverge_from_logits(hidden, Head(weight, 2003), hidden, served, targets, budget).q
    alone = score_rows(hidden, lambda rows: served(rows)[:, :2003], targets, 2003, budget)
    for name in Columns.__slots__:
        assert torch.equal(getattr(beside, name), getattr(alone, name)), name


MEMORY = """
import resource, sys, torch
from scoremode.head.divergence import divergence_partials
from scoremode.head.columns import target_logits
from scoremode.head import budget, divergence
budget.CPU_WORKSPACE = 16 << 20
n, v = 160, 128_256  # 78 MiB of logits a side
x_p, x_q = torch.randn(n, v), torch.randn(n, v)
targets = torch.zeros(n, 1, dtype=torch.int64)
divergence_partials(x_p[:2], x_q[:2], targets[:2], target_logits(x_q[:2], targets[:2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
divergence_partials(x_p, x_q, targets, target_logits(x_q, targets))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_divergence_takes_little_memory_beside_its_logits() -> None:
    """Six float64 copies of a block once took 940 MiB here, and 3 GB on a GPU."""
    at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is returned to the system at once
    ran = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, env=at_once)
    assert int(ran.stdout) < 24 << 10  # KiB: the workspace of 16 MiB and a little more


def test_what_is_promised_of_memory() -> None:
    assert budget.most_bytes("cuda") <= 320 << 20
    assert budget.most_bytes("cuda", models=2) <= 544 << 20
    for columns in (1, 32_000, 262_144):
        rows = budget.rows_of_workspace(columns, 8 * divergence.COPIES, "cuda")
        assert rows == 1 or rows * columns * 8 * divergence.COPIES <= budget.DEVICE_WORKSPACE


def test_ranks_whose_stored_slices_differ_exchange_equally_often() -> None:
    """The model's own head is padded equally on every rank; a baseline's slice has only real ids."""
    hidden, weight, other, targets = draw(40, 8, 500, 1)
    exchanged = []
    for real in (500, 20):
        calls: list[int] = []

        def share(at: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(len(at))
            return at

        p, q = Head(weight[:real], real), Head(other, real)
        part, _ = diverge_in_chunks(hidden, p, hidden, q, targets % real, share, budget=4 * 500 * 3)
        assert len(part.largest_p) == 40
        exchanged.append(calls)
    assert len(exchanged[0]) > 2
    assert exchanged[0] == exchanged[1]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
def test_whole_blocks_of_nothing_on_either_side(way: Diverge) -> None:
    p, q = torch.full((900,), -math.inf), torch.full((900,), -math.inf)
    p[500:] = torch.linspace(-1, 1, 400)
    q[400:] = torch.linspace(1, -1, 500)
    truth = define_divergence(p[None], q[None], torch.tensor([[0]])).kl.item()
    assert kl_of(way, p, q) == pytest.approx(truth, rel=1e-6)
    assert kl_of(way, q, p) == math.inf
