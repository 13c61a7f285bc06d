"""Sums and order statistics that are read block by block are those of the whole column, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from scoremode.core.statistics import streams
from scoremode.core.statistics.streams import StreamedSum, order_statistics, streamed_quantile
from scoremode.values import Floats

LENGTHS = [1, 7, 8, 127, 128, 129, 1000, 1024, 1031, 16_384, 65_537, 300_007]


def values_of(n: int) -> Floats:
    some = np.random.default_rng(n)
    values: Floats = some.standard_normal(n) * np.exp(5 * some.standard_normal(n))
    return values


def cut(values: Floats, size: int) -> Iterator[Floats]:
    return (values[begin : begin + size] for begin in range(0, len(values), size))


@pytest.mark.parametrize("leaf", [128, 1000, 1 << 16])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_sum_in_blocks_has_the_bits_of_numpy(monkeypatch: pytest.MonkeyPatch, n: int, leaf: int) -> None:
    monkeypatch.setattr(streams, "LEAF", leaf)
    values = values_of(n)
    for size in (n, 16_384, 333):
        total = StreamedSum(n)
        for block in cut(values, size):
            total.add(block)
        assert total.value == float(values.sum())
        assert total.mean == float(values.mean())


def test_a_plain_running_sum_would_differ() -> None:
    """Proves that the test above can fail."""
    values = values_of(300_007)
    assert float(np.cumsum(values)[-1]) != float(values.sum())


@pytest.mark.parametrize("kind", ["any", "whole numbers", "one value", "infinite", "zeros of both signs"])
@pytest.mark.parametrize("n", [1, 99, 101, 5000, 100_003])
def test_order_statistics_are_those_of_a_sort(monkeypatch: pytest.MonkeyPatch, n: int, kind: str) -> None:
    monkeypatch.setattr(streams, "MOST", 100)
    values = values_of(n)
    if kind == "whole numbers":
        values = np.round(values)
    elif kind == "one value":
        values[:] = 3.5
    elif kind == "infinite":
        values[::3], values[1::5] = np.inf, -np.inf
    elif kind == "zeros of both signs":
        values[::2], values[1::2] = -0.0, 0.0
    places = {0, n - 1, n // 2, n // 3, int(n * 0.99)}
    found = order_statistics(cut(values, 777), n, places)
    assert found == {place: float(np.sort(values)[place]) for place in sorted(places)}


@pytest.mark.parametrize("n", [1, 2, 3, 101, 5000, 100_003])
def test_a_quantile_in_blocks_has_the_bits_of_numpy(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(streams, "MOST", 100)
    values = values_of(n)
    for fraction in (0.0, 0.005, 0.3, 0.5, 0.99, 0.9995, 1.0):
        assert streamed_quantile(cut(values, 777), n, fraction) == float(np.quantile(values, fraction))
    assert streamed_quantile(cut(values, 777), n, 0.5) == float(np.median(values))
