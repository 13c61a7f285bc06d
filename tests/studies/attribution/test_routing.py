"""Shares of changed routes, and KL split by them, against sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from scoremode.studies.attribution.routing import routing_of


def test_split_equals_sums_by_hand() -> None:
    random = np.random.default_rng(0)
    n, groups = 60, np.repeat(np.arange(6), 10)
    a = np.sort(random.integers(0, 4, (3, n, 2)), axis=2).astype(np.int16)
    b = np.where(random.random((3, n, 1)) < 0.2, np.sort(random.integers(0, 4, (3, n, 2)), axis=2), a).astype(np.int16)
    kl = random.exponential(size=n)
    found = routing_of(("b", "c"), ("layer 0", "layer 1", "layer 2"), (a, b), kl, groups, of_experts=4)
    differs = [[set(a[i, t]) != set(b[i, t]) or sorted(a[i, t]) != sorted(b[i, t]) for t in range(n)] for i in range(3)]
    for (_, share), own in zip(found.changed, differs, strict=True):
        assert share.value == pytest.approx(sum(own) / n)
        assert share.stderr is not None
    anywhere = [any(own[t] for own in differs) for t in range(n)]
    moved = [k for k, there in zip(kl, anywhere, strict=True) if there]
    stayed = [k for k, there in zip(kl, anywhere, strict=True) if not there]
    assert found.any_changed.value == pytest.approx(len(moved) / n)
    assert (found.kl_changed.value, found.kl_same.value) == pytest.approx((np.mean(moved), np.mean(stayed)))
    assert found.share_of_kl.value == pytest.approx(sum(moved) / kl.sum())
    assert (found.kl_changed.n, found.kl_same.n, found.kl.n) == (len(moved), len(stayed), n)
    assert found.as_json()["layers"][1]["changed"] == pytest.approx(sum(differs[1]) / n)


def test_no_changed_route_has_no_mean_and_no_nan_in_json() -> None:
    routes = np.zeros((1, 3, 1), np.int16)
    found = routing_of(("b", "c"), ("layer 0",), (routes, routes), np.ones(3), np.arange(3), of_experts=2)
    assert (found.any_changed.value, found.kl_changed.n, found.kl_same.value) == (0.0, 0, 1.0)
    assert found.as_json()["kl_changed"] is None
