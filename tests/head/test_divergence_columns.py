"""KL both ways, total variation and first choices on every path of the head, judged by the float64 definition."""

from __future__ import annotations

import math
import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from scoremode.head import blocked
from scoremode.head.blocked import diverge_blocked
from scoremode.head.chunked import diverge_from_logits, diverge_in_chunks
from scoremode.head.columns import Columns, target_logits
from scoremode.head.divergence import (
    Divergence,
    DivergencePartials,
    combine_divergence,
    define_divergence,
    divergence_of,
    divergence_partials,
    finish_divergence,
    gather_own,
)
from scoremode.head.kernels import Diverge
from scoremode.head.matrix import Head

NAMES = ("kl", "kl_reverse", "total_variation", "same_first")
INF = float("inf")


def agree(found: Divergence, p: Tensor, q: Tensor, targets: Tensor, within: float = 1e-12) -> None:
    true = define_divergence(p, q, targets)
    for name in NAMES:
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(true, name).double(), rtol=within, atol=within, msg=name
        )
    assert found.total_variation is not None
    assert bool((found.total_variation >= 0).all())
    assert bool((found.total_variation <= 1).all())


def of_logits(p: Tensor, q: Tensor, targets: Tensor) -> Divergence:
    at_q = target_logits(q, targets)
    return finish_divergence(divergence_partials(p, q.clone(), targets, at_q, gather=gather_own), at_q)


def test_the_definition_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    true = define_divergence(p, q, torch.zeros(1, 1, dtype=torch.int64))
    assert true.kl.item() == pytest.approx(0.25 * math.log(2), abs=1e-7)
    assert true.kl_reverse is not None
    assert true.kl_reverse.item() == pytest.approx(0.25 * math.log(2), abs=1e-7)
    assert true.total_variation is not None
    assert true.total_variation.item() == pytest.approx(0.25, abs=1e-7)
    assert true.same_first is not None
    assert true.same_first.item() == 0


def odd_rows(v: int) -> tuple[Tensor, Tensor]:
    """Logits of p and q: unlike, equal, with ties, with forbidden ids on one side or both, without a common id."""
    random = torch.Generator().manual_seed(v)
    p = torch.randn(12, v, generator=random) * 3
    q = p + 0.1 * torch.randn(12, v, generator=random)
    q[1] = p[1]
    p[2], q[2] = 0.0, 0.0
    p[3], q[3] = p[3].round(), q[3].round()
    if v > 1:
        p[4, 1::2] = -INF  # KL(p‖q) is finite, KL(q‖p) is not
        q[5, ::2] = -INF
        p[6, 1:], q[6, 1:] = -INF, -INF
        p[7, ::2], q[7, 1::2] = -INF, -INF  # nothing in common
        p[8, -1], q[8, -1] = -INF, -INF
    p[9], q[9] = p[9] + 900, q[9] - 900
    return p, q


@pytest.mark.parametrize("v", [1, 2, 3, 5, 7, 1003])
def test_odd_rows(v: int) -> None:
    p, q = odd_rows(v)
    targets = torch.zeros(12, 1, dtype=torch.int64)
    agree(of_logits(p, q, targets), p, q, targets, 1e-11)
    found = divergence_of(p, q)
    assert all(torch.equal(found[name], getattr(of_logits(p, q, targets), name)) for name in NAMES)
    if v > 1:
        assert found["total_variation"][7].item() == pytest.approx(1, abs=1e-15)
        assert found["kl"][7] == found["kl_reverse"][7] == INF
    for row in (1, 2, 6):
        assert [found[name][row].item() for name in NAMES] == [0, 0, 0, 5]


SHAPES = [(1, 8, 1), (3, 8, 7), (140, 8, 3), (140, 16, 1003), (300, 17, 5003), (7, 5, 2)]


@pytest.mark.parametrize("way", [diverge_blocked, diverge_in_chunks])
@pytest.mark.parametrize(("n", "d", "v"), SHAPES)
def test_every_way_to_compute_them(way: Diverge, n: int, d: int, v: int) -> None:
    hidden, p, q, targets = drawn(n, d, v)
    found = finish_divergence(*way(hidden, p, hidden, q, targets, gather=gather_own))
    agree(found, p.logits(hidden), q.logits(hidden), targets, 1e-6)  # total variation is from weights in float32
    same = finish_divergence(*way(hidden, p, hidden, p, targets, gather=gather_own))
    assert [getattr(same, name).unique().tolist() for name in NAMES] == [[0], [0], [0], [5]]
    alone = finish_divergence(*way(hidden, p, hidden, q, targets))
    assert alone.total_variation is None
    assert torch.equal(alone.kl, found.kl)


def drawn(n: int, d: int, v: int) -> tuple[Tensor, Head, Head, Tensor]:
    """Numbers with few bits: float32 can add their products exactly, in any order."""
    random = torch.Generator().manual_seed(n + d + v)
    weight = (16 * torch.randn(v, d, generator=random)).round() / 16
    other = weight + (1.6 * torch.randn(v, d, generator=random)).round() / 16
    targets = torch.randint(0, v, (n, 1), generator=random)
    return (8 * torch.randn(n, d, generator=random)).round() / 8, Head(weight, v), Head(other, v), targets


def test_a_head_that_is_a_function() -> None:
    hidden, p, q, targets = drawn(30, 8, 1003)
    found = diverge_from_logits(hidden, p, hidden, q.logits, targets, budget=4 * 1003 * 7)
    agree(found, p.logits(hidden), q.logits(hidden), targets)


@pytest.mark.parametrize("way", [diverge_blocked, diverge_in_chunks])
@pytest.mark.parametrize("cuts", [[501], [1, 2, 1000], [0, 700]])
def test_ranks_that_exchange_their_sums(way: Diverge, cuts: list[int]) -> None:
    hidden, p, q, targets = drawn(150, 8, 1003)
    edges = list(pairwise([0, *cuts, 1003]))
    barrier, sent = threading.Barrier(len(edges)), [torch.zeros(0)] * len(edges)
    found: list[tuple[DivergencePartials, Tensor] | None] = [None] * len(edges)

    def rank(number: int) -> None:
        begin, end = edges[number]

        def gather(own: Tensor) -> list[Tensor]:
            sent[number] = own
            barrier.wait(30)
            every = list(sent)
            barrier.wait(30)
            return every

        def share(at: Tensor) -> Tensor:
            return torch.stack(gather(at)).amax(0)

        slices = [Head(x.weight[begin:end], end - begin, first_id=begin) for x in (p, q)]
        found[number] = way(hidden, slices[0], hidden, slices[1], targets, share, gather)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(edges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    parts = [part for part in found if part is not None]
    assert len(parts) == len(edges)
    whole = finish_divergence(combine_divergence([part for part, _ in parts]), parts[0][1])
    agree(whole, p.logits(hidden), q.logits(hidden), targets, 1e-6)
    assert isinstance(whole.q, Columns)


@pytest.mark.parametrize("kept", [0, 2 * 300 * 1024, 2 * 300 * 3000])
def test_weights_that_are_not_kept_are_computed_again_with_the_same_bits(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, p, q, targets = drawn(300, 17, 15003)
    whole = finish_divergence(*diverge_blocked(hidden, p, hidden, q, targets, gather=gather_own))
    monkeypatch.setattr(blocked, "KEPT_WEIGHTS", kept)
    found = finish_divergence(*diverge_blocked(hidden, p, hidden, q, targets, gather=gather_own))
    assert all(torch.equal(getattr(found, name), getattr(whole, name)) for name in NAMES)
