"""Charts of how values are distributed over the targets: KL, Δ logprob and surprise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scoremode.report.html.drawing import SMALL, Axis, Chart, Shape, both_ways, linear, logarithmic, plain
from scoremode.report.html.series import Series, StreamedColumn
from scoremode.values import Floats

BINS = 72


def kl_distribution(series: Sequence[Series], noise: StreamedColumn | None, floor: float | None) -> Chart | None:
    """Share of targets by KL; the noise of the baseline is drawn behind the curves, its 99 % ``floor`` as a line."""
    drawn = [s.finite for s in series]
    behind = None if noise is None else noise.where(np.isfinite)
    positive = StreamedColumn.joined(*drawn, *([behind] if behind else [])).where(lambda values: values > 0)
    if not positive.count:
        return None
    low = 10.0 ** math.floor(max(-12.0, math.log10(positive.quantile(0.005))))
    high = 10.0 ** math.ceil(math.log10(positive.largest) + 1e-9)
    axis = logarithmic(low, max(high, low * 10), "KL, nats per token")
    if axis.marks() and axis.marks()[0][0] < 0.01:  # smaller values are counted in the first bin
        first = next(i for i, (value, _) in enumerate(axis.ticks) if axis.place(value) >= -1e-9)
        (value, text), later = axis.ticks[first], axis.ticks[first + 1 :]
        axis = replace(axis, ticks=((value, f"≤{text}"), *later))
    title = "How far predictions moved"
    text = "Share of tokens by KL divergence from the baseline, on a logarithmic axis."
    shown = floor if floor is not None and math.isfinite(floor) and floor > low else None
    return _histogram(title, text, series, drawn, axis, noise=behind, line=("noise 99%", shown), least=low)


def delta_distribution(series: Sequence[Series]) -> Chart | None:
    """Share of targets by Δ logprob: linear near zero, logarithmic in the tails."""
    drawn = [s.finite for s in series]
    sizes = StreamedColumn.joined(*drawn).absolute()
    if not sizes.largest > 0:
        return None
    middle = max(sizes.quantile(0.5), sizes.largest * 1e-4)
    axis = both_ways(10.0 ** math.floor(math.log10(middle)), sizes.largest * 1.05, "Δ logprob, nats")
    title = "How the text's own tokens changed"
    text = "Share of tokens by change in log-probability; left of zero, they became less likely."
    return _histogram(title, text, series, drawn, axis, line=("", 0.0))


def surprise_distribution(series: Sequence[Series]) -> Chart | None:
    """Share of targets by −logprob, for runs that are not compared with anything."""
    drawn = [s.finite for s in series]
    top = max((d.quantile(0.9995) for d in drawn if d.count), default=0.0)
    if not top > 0:
        return None
    axis = linear(0, top, "surprise (−logprob), nats")
    return _histogram("How surprised the model was", "Share of tokens by surprise.", series, drawn, axis)


def _histogram(
    title: str,
    text: str,
    series: Sequence[Series],
    drawn: Sequence[StreamedColumn],
    axis: Axis,
    *,
    noise: StreamedColumn | None = None,
    line: tuple[str, float | None] = ("", None),
    least: float | None = None,
) -> Chart:
    """``line`` is an upright line: its name and its value. Values below ``least`` are counted in the first bin."""
    shares = [_shares(values, axis, least) for values in drawn]
    # a floor with many exact zeros must not flatten the curves of the candidates, so it may exceed the top
    top = max((float(s.max()) for s in shares if len(s)), default=0.0) or 1.0
    up = linear(0, top * 1.06, "share of tokens", count=4, write=lambda v: f"{plain(100 * v)}%")
    shapes = []
    if noise is not None:
        steps = [(0.0, 0.0), *_steps(_shares(noise, axis, least), up), (1.0, 0.0)]
        shapes.append(Shape("noise", f"{SMALL.path(steps)}Z"))
    if line[1] is not None and 0 <= float(axis.place(line[1])) <= 1:
        shapes.append(_upright(float(axis.place(line[1])), line[0]))
    shapes += [Shape("line", SMALL.path(_steps(s, up)), i, series[i].name) for i, s in enumerate(shares)]
    return Chart(title, text, axis, up, shapes)


def _shares(column: StreamedColumn, axis: Axis, least: float | None) -> Floats:
    """Share of the values in each bin; values beyond an end count in the outermost bin."""
    counts = np.zeros(BINS, np.int64)
    for values in column.blocks():
        within = values if least is None else np.maximum(values, least)
        index = np.clip((axis.place(within) * BINS).astype(np.int64), 0, BINS - 1)
        counts += np.bincount(index, minlength=BINS)
    shares: Floats = counts / max(1, int(counts.sum()))
    return shares


def _steps(shares: Floats, up: Axis) -> list[tuple[float, float]]:
    heights = [min(1.02, float(up.place(share))) for share in shares.tolist()]
    return [(edge / BINS, height) for i, height in enumerate(heights) for edge in (i, i + 1)]


def _upright(place: float, name: str) -> Shape:
    x, path = SMALL.x(place), f"M{SMALL.x(place):.1f} {SMALL.top:g}V{SMALL.y(0):g}"
    anchor, at = ("start", x + 4) if place < 0.6 else ("end", x - 4)
    return Shape("mark", path, note=(at, SMALL.top + 9, anchor, name) if name else None)
