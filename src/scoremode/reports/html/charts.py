"""The charts section of the page: distributions over targets, means along the window, and notes on omitted tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from scoremode.core.statistics.comparison import Comparison, are_of_paths
from scoremode.core.statistics.depth import depths_of, means_by_stretch
from scoremode.reports.html.drawing import SMALL, Axis, Chart, Shape, both_ways, linear, logarithmic, plain
from scoremode.reports.html.templating import fill
from scoremode.reports.served import distinct_baselines
from scoremode.reports.text import counted
from scoremode.values import Floats, Ints

BINS = 72  # bins of a distribution
STRETCHES = 24  # stretches that the window is divided into


@dataclass(frozen=True)
class Series:
    """One candidate: its value per target, where each target stands in its window, and its group."""

    name: str
    values: Floats
    depth: Ints
    groups: Ints

    @property
    def finite(self) -> Floats:
        """The values that can be drawn."""
        finite: Floats = self.values[np.isfinite(self.values)]
        return finite


def delta_logprob(c: Comparison) -> Floats:
    """The nats by which each token became likelier; NaN if both models give it probability zero."""
    with np.errstate(invalid="ignore"):
        deltas: Floats = c.cand - c.base
    return deltas


def charts_section(comparisons: Sequence[Comparison]) -> Markup:
    figures = [figure for figure in _comparison_charts(comparisons) if figure] if comparisons else []
    if not figures:
        return Markup()
    return fill(
        "charts.html",
        figures=figures,
        names=[c.name for c in comparisons],
        noise=any(c.noise_kl is not None and len(c.noise_kl) for c in comparisons),
        notes=list(_notes_on_comparisons(comparisons)),
    )


def _comparison_charts(comparisons: Sequence[Comparison]) -> list[Chart | None]:
    depths = [depths_of(c.baseline) for c in comparisons]
    deltas = [Series(c.name, delta_logprob(c), depth, c.groups) for c, depth in zip(comparisons, depths, strict=True)]
    text = "Mean Δ logprob by position in the window; below zero, the text became less likely."
    title = "Where the text became less likely"
    drawn = [delta_distribution(deltas), along_the_window(title, text, deltas, "Δ logprob, nats")]
    if are_of_paths(comparisons):  # means of paths agree, single tokens may not
        text = "Root mean square of Δ logprob by position in the window, with one standard error."
        drawn.append(along_the_window("How far single tokens moved", text, deltas, "rms of Δ logprob, nats", rms=True))
    if all(c.kl is None for c in comparisons):
        return drawn
    # a candidate without KL keeps its place, so that its colour is the same in every chart
    kls = [
        Series(c.name, np.full(len(depth), np.nan) if c.kl is None else c.kl, depth, c.groups)
        for c, depth in zip(comparisons, depths, strict=True)
    ]
    noises = [c.noise_kl for c in distinct_baselines(comparisons) if c.noise_kl is not None]
    noise = np.concatenate(noises) if any(map(len, noises)) else None
    text = "Mean KL by position in the window, with one standard error."
    drift = along_the_window("Does drift grow with context?", text, kls, "KL, nats")
    return [kl_distribution(kls, noise), drawn[0], drift, *drawn[1:]]


# ── tokens that are not drawn ────────────────────────────────────────────────────────────────────────────────────────
def _notes_on_comparisons(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for c in comparisons:
        if unbounded := int((~np.isfinite(delta_logprob(c))).sum()):
            left_out = f"{counted(unbounded, 'tokens')} left out of the charts: probability zero in one of the models"
            yield f"{c.name}: {left_out}."
        if c.kl is None:
            why = "no KL, because two finished runs were compared, and runs do not store whole distributions"
            yield f"{c.name}: {c.manifest.get('kl_missing') or why}."
        elif below := int((c.kl < 0).sum()):
            where = "drawn at the left end of its distribution; a mean below zero is not drawn by model size"
            yield f"{c.name}: {counted(below, 'tokens')} with a KL below zero, {where}."


# ── distributions over the targets ───────────────────────────────────────────────────────────────────────────────────
def kl_distribution(series: Sequence[Series], noise: Floats | None) -> Chart | None:
    """Draws the share of targets by KL, and the baseline's noise behind the curves."""
    behind = None if noise is None else noise[np.isfinite(noise)]
    drawn = np.concatenate([*(s.finite for s in series), *([] if behind is None else [behind])])
    positive = drawn[drawn > 0]
    if not len(positive):
        return None
    low = 10.0 ** math.floor(max(-12.0, math.log10(float(np.quantile(positive, 0.005)))))
    high = 10.0 ** math.ceil(math.log10(float(positive.max())) + 1e-9)
    axis = logarithmic(low, max(high, low * 10), "KL, nats per token")
    if axis.marks() and axis.marks()[0][0] < 0.01:  # smaller values are counted in the first bin
        first = next(i for i, (value, _) in enumerate(axis.ticks) if axis.place(value) >= -1e-9)
        (value, text), later = axis.ticks[first], axis.ticks[first + 1 :]
        axis = replace(axis, ticks=((value, f"≤{text}"), *later))
    title = "How far predictions moved"
    text = "Share of tokens by KL divergence from the baseline, on a logarithmic axis."
    return _histogram(title, text, series, axis, noise=behind, least=low)


def delta_distribution(series: Sequence[Series]) -> Chart | None:
    """Draws the share of targets by Δ logprob; the axis is linear near zero and logarithmic in the tails."""
    sizes = np.abs(np.concatenate([s.finite for s in series]))
    largest = float(sizes.max(initial=0.0))
    if not largest > 0:
        return None
    middle = max(float(np.quantile(sizes, 0.5)), largest * 1e-4)
    axis = both_ways(10.0 ** math.floor(math.log10(middle)), largest * 1.05, "Δ logprob, nats")
    text = "Share of tokens by change in log-probability; left of zero, they became less likely."
    return _histogram("How the text's own tokens changed", text, series, axis, line=0.0)


def _histogram(
    title: str,
    text: str,
    series: Sequence[Series],
    axis: Axis,
    *,
    noise: Floats | None = None,
    line: float | None = None,
    least: float | None = None,
) -> Chart:
    """Draws a histogram with a vertical ``line``. Values below ``least`` count in the first bin."""
    shares = [_shares(s.finite, axis, least) for s in series]
    # noise with many exact zeros must not flatten the curves of the candidates, so it may exceed the top
    top = max((float(s.max()) for s in shares if len(s)), default=0.0) or 1.0
    up = linear(0, top * 1.06, "share of tokens", count=4, write=lambda v: f"{plain(100 * v)}%")

    def steps(shares: Floats) -> list[tuple[float, float]]:
        heights = [min(1.02, float(up.place(share))) for share in shares.tolist()]
        return [(edge / BINS, height) for i, height in enumerate(heights) for edge in (i, i + 1)]

    shapes = []
    if noise is not None:
        shapes.append(Shape("noise", f"{SMALL.path([(0.0, 0.0), *steps(_shares(noise, axis, least)), (1.0, 0.0)])}Z"))
    if line is not None:
        shapes.append(Shape("mark", f"M{SMALL.x(float(axis.place(line))):.1f} {SMALL.top:g}V{SMALL.y(0):g}"))
    shapes += [Shape("line", SMALL.path(steps(s)), i, series[i].name) for i, s in enumerate(shares)]
    return Chart(title, text, axis, up, shapes)


def _shares(values: Floats, axis: Axis, least: float | None) -> Floats:
    """Returns the share of the values in each bin; values beyond an end count in the outermost bin."""
    within = values if least is None else np.maximum(values, least)
    index = np.clip((axis.place(within) * BINS).astype(np.int64), 0, BINS - 1)
    shares: Floats = np.bincount(index, minlength=BINS) / max(1, len(values))
    return shares


# ── means along the window ───────────────────────────────────────────────────────────────────────────────────────────
def along_the_window(
    title: str, text: str, series: Sequence[Series], measured: str, *, rms: bool = False
) -> Chart | None:
    """Draws the mean (or root mean square) in each stretch of the window, with its error over groups as a band."""
    last = max((int(s.depth.max(initial=0)) for s in series), default=0)
    if last < 2:
        return None
    edges = np.linspace(0, last + 1, min(STRETCHES, last + 1) + 1)
    curves = [_curve(s, edges, rms=rms) for s in series]
    spread = np.concatenate([np.concatenate([m - e, m + e]) for m, e in curves])
    spread = spread[np.isfinite(spread)]
    if not len(spread):
        return None
    low, high = float(spread.min()), float(spread.max())
    low = 0.0 if low >= 0 and high > 0 else low
    room = (high - low) * 0.06 or 1.0
    up = linear(low - (room if low < 0 else 0), high + room, measured, count=4)
    along = linear(0, last + 1, "distance from the first scored token of the window", count=5)
    x = along.place((edges[1:] + edges[:-1]) / 2)
    shapes = [Shape("mark", SMALL.path([(0, up.place(0.0))]) + f"H{SMALL.x(1):g}")] if low < 0 < high else []
    lines = []  # drawn above all bands
    for i, (mean, error) in enumerate(curves):
        good = np.isfinite(mean)
        there, back, line = (
            list(zip(x[good].tolist(), up.place(mean + sign * error)[good].tolist(), strict=True))
            for sign in (1, -1, 0)
        )
        if good.any():
            shapes.append(Shape("band", f"{SMALL.path([*there, *back[::-1]])}Z", i))
        lines.append(Shape("line", SMALL.path(line), i, series[i].name))
    return Chart(title, text, along, up, [*shapes, *lines])


def _curve(series: Series, edges: Floats, *, rms: bool) -> tuple[Floats, Floats]:
    """Returns mean and standard error of each stretch; the mean is NaN without values, the error 0 for few groups.

    For ``rms``, the roots of mean squares and their errors, to first order; no band reaches below zero.
    """
    values = np.square(series.values) if rms else series.values
    means = means_by_stretch(values, series.depth, series.groups, edges)
    mean, error = np.array([e.value for e in means]), np.array([e.stderr or 0.0 for e in means])
    if not rms:
        return mean, error
    root = np.sqrt(mean)
    with np.errstate(invalid="ignore", divide="ignore"):
        return root, np.minimum(np.where(root > 0, error / (2 * root), 0.0), np.where(np.isfinite(root), root, 0.0))
