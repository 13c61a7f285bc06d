"""The chart of means along the window: does drift grow, or surprise fall, as the context gets longer?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scoremode.report.html.drawing import SMALL, Chart, Shape, linear
from scoremode.report.html.series import Series
from scoremode.statistics.estimate import GroupSums
from scoremode.statistics.groups import distinct
from scoremode.values import Estimate, Floats, Ints

BINS = 24
SUMS = 1 << 20  # sums that are held at a time: with very many groups, a curve is drawn in several passes


def along_the_window(title: str, text: str, series: Sequence[Series], label: str) -> Chart | None:
    """Mean per stretch of the window, with the standard error over its groups as a band."""
    last = max((int(position.max()) for s in series for position, _ in s.places() if len(position)), default=0)
    if last < 2:
        return None
    edges = np.linspace(0, last + 1, min(BINS, last + 1) + 1)
    curves = [_binned(s, edges) for s in series]
    spread = np.concatenate([np.concatenate([m - e, m + e]) for m, e in curves])
    spread = spread[np.isfinite(spread)]
    if not len(spread):
        return None
    low, high = float(spread.min()), float(spread.max())
    low = 0.0 if low >= 0 and high > 0 else low
    room = (high - low) * 0.06 or 1.0
    up = linear(low - (room if low < 0 else 0), high + room, label, count=4)
    along = linear(0, last + 1, "distance from the first scored token of the window", count=5)
    x = along.place((edges[1:] + edges[:-1]) / 2)
    shapes = [Shape("mark", SMALL.path([(0, up.place(0.0))]) + f"H{SMALL.x(1):g}")] if low < 0 < high else []
    for i, (mean, error) in enumerate(curves):
        good = np.isfinite(mean)
        if good.any():
            there, back = (up.place(mean + sign * error)[good].tolist() for sign in (1, -1))
            band = [*zip(x[good].tolist(), there, strict=True), *zip(x[good][::-1].tolist(), back[::-1], strict=True)]
            shapes.append(Shape("band", f"{SMALL.path(band)}Z", i))
    for i, (mean, _) in enumerate(curves):
        good = np.isfinite(mean)
        line = zip(x[good].tolist(), up.place(mean)[good].tolist(), strict=True)
        shapes.append(Shape("line", SMALL.path(line), i, series[i].name))
    return Chart(title, text, along, up, shapes)


def _binned(series: Series, edges: Floats) -> tuple[Floats, Floats]:
    """Mean and standard error per bin; NaN if a bin is empty, error 0 if there are too few groups for one."""
    bins = len(edges) - 1
    means, errors = np.full(bins, np.nan), np.zeros(bins)
    groups = distinct(group for _, group in series.places())
    together = max(1, SUMS // max(1, len(groups)))
    for begin in range(0, bins, together):
        wanted = range(begin, min(bins, begin + together))
        for b, mean in zip(wanted, _means(series, edges, groups, wanted), strict=True):
            if mean.n:
                means[b], errors[b] = mean.value, mean.stderr or 0.0
    return means, errors


def _means(series: Series, edges: Floats, groups: Ints, wanted: range) -> list[Estimate]:
    """The means of some bins."""
    sums = GroupSums(len(wanted) * len(groups))
    for values, (position, group) in zip(series.values(), series.places(), strict=True):
        index = np.clip(np.searchsorted(edges, position, side="right") - 1, 0, len(edges) - 2)
        here = np.isfinite(values) & (index >= wanted.start) & (index < wanted.stop)
        cell = (index[here] - wanted.start) * len(groups) + np.searchsorted(groups, group[here])
        sums.add(cell, values[here], np.ones(len(cell)))
    found = []
    for number in range(len(wanted)):
        cells = slice(number * len(groups), (number + 1) * len(groups))
        there = sums.denominator[cells] > 0  # a group without a value in this bin is none of its groups
        own = GroupSums(int(there.sum()))
        own.numerator, own.denominator = sums.numerator[cells][there], sums.denominator[cells][there]
        own.n = int(own.denominator.sum())
        found.append(own.estimate())
    return found
