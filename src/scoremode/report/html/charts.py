"""Charts as inline SVG: drawn once, in Python, so that they print, need no script and look the same everywhere.

Colours are CSS classes (``s0`` … ``s7`` for candidates), so that one drawing works in light mode, dark mode and print.
A chart is 380 units wide: three fit side by side on a desktop screen, and on a phone its text stays readable.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.report.html.series import Column, Series
from scoremode.statistics.estimate import GroupSums
from scoremode.statistics.groups import distinct
from scoremode.values import Estimate, Floats, Ints

SERIES = 8  # colours in the style sheet; further candidates reuse them with a different dash
DASHES = ("", "6 3", "2 2.5", "9 3 2 3")
WIDTH, HEIGHT = 380, 244
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 24, 38  # margins of the plotted area
BINS = 72
POSITION_BINS = 24
SUMS = 1 << 20  # sums that are held at a time: with very many groups, a curve is drawn in several passes

# characters that reorder or hide the text around them; joiners are kept, scripts and emoji need them
BIDIRECTIONAL = {"\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
JOINERS = {"\u200c", "\u200d"}
UNSEEN = {"Cc", "Cs", "Cn", "Zl", "Zp"}


def visible(text: object) -> str:
    """Text with every character replaced that is invisible, reorders its surroundings or cannot be encoded as UTF-8.

    >>> visible("a" + chr(0) + chr(0x202E) + "b")
    'a␀⟨U+202E⟩b'
    """
    given = str(text)
    if given.isascii() and given.isprintable():
        return given
    return "".join(map(_visible_character, given))


def _visible_character(c: str) -> str:
    if c in "\n\t" or c in JOINERS:
        return c
    if ord(c) < 0x20:
        return chr(0x2400 + ord(c))
    hidden = c in BIDIRECTIONAL or unicodedata.category(c) in UNSEEN or c in "\ufeff\u200b\u2060"
    return f"⟨U+{ord(c):04X}⟩" if hidden else c


def escaped(text: object) -> str:
    """Untrusted text, escaped for HTML, SVG or a quoted attribute."""
    return html.escape(visible(text), quote=True)


@dataclass(frozen=True)
class Axis:
    """Maps values to a place between 0 and 1, with the values of its labelled ticks."""

    place: Callable[[Any], Any]
    ticks: tuple[tuple[float, str], ...]
    label: str

    def marks(self) -> list[tuple[float, str]]:
        places = [(float(self.place(value)), text) for value, text in self.ticks]
        return [(p, text) for p, text in places if -1e-9 <= p <= 1 + 1e-9]


def linear(low: float, high: float, label: str, *, count: int = 5, write: Callable[[float], str] | None = None) -> Axis:
    if not high > low:
        low, high = low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    values = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
    written = write or (lambda value: plain(value, step))
    return Axis(lambda v: (v - low) / (high - low), tuple((v, written(v)) for v in values), label)


def logarithmic(low: float, high: float, label: str) -> Axis:
    """Whole powers of ten, thinned so that their labels do not touch."""
    begin, end = math.log10(low), math.log10(high)
    powers = range(math.ceil(begin - 1e-9), math.floor(end + 1e-9) + 1)
    every = max(1, math.ceil(len(powers) / 7))
    ticks = tuple((10.0**p, power_of_ten(p)) for p in powers if p % every == 0)
    if len(ticks) < 2:  # less than a decade: powers of ten alone would leave the axis empty
        finer = [m * 10.0**p for p in range(math.floor(begin), math.ceil(end) + 1) for m in range(1, 10)]
        within = [v for v in finer if low <= v <= high]
        ticks = tuple((v, plain(v)) for v in within[:: math.ceil(len(within) / 5) or 1])
    return Axis(lambda v: (np.log10(v) - begin) / (end - begin), ticks, label)


def both_ways(unit: float, reach: float, label: str) -> Axis:
    """Linear near zero, logarithmic beyond ``unit``, symmetric."""
    far = math.asinh(reach / unit)
    powers = range(round(math.log10(unit)), math.floor(math.log10(reach) + 1e-9) + 1)
    every = max(1, math.ceil(len(powers) / 3))
    # near zero the labels would be too close to each other to read
    sizes = [10.0**p for p in powers if math.asinh(10.0**p / unit) / far > 0.22][::-1][::every]
    ticks = [(-s, "−" + plain(s)) for s in sizes] + [(0.0, "0")] + [(s, plain(s)) for s in sizes]
    return Axis(lambda v: (np.arcsinh(np.asarray(v) / unit) / far + 1) / 2, tuple(ticks), label)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def plain(value: float, step: float | None = None) -> str:
    """A short number for an axis: 0.05, 1.002, 12,000, 3e−6."""
    if value == 0:
        return "0"
    if step is not None and step >= 1e-4:
        digits = max(0, -math.floor(math.log10(step) + 1e-9) + (0 if _leading(step) != 2.5 else 1))
        return f"{value:,.{digits}f}".replace("-", "−")
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    return f"{value:,.4g}".replace("-", "−")


def _leading(step: float) -> float:
    return round(step / 10.0 ** math.floor(math.log10(step) + 1e-9), 3)


def power_of_ten(power: int) -> str:
    if -3 < power < 4:
        return plain(10.0**power)
    return "10" + "".join("⁻" if c == "-" else "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(c)] for c in str(power))


def style_of(index: int) -> str:
    """Class and dash of the index-th candidate, as attributes."""
    dash = DASHES[(index + index // SERIES) % len(DASHES)]
    return f'class="line s{index % SERIES}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def swatch(index: int) -> str:
    """A piece of the candidate's line, for legends and tables."""
    line = f'<line x1="1" x2="27" y1="5" y2="5" {style_of(index)}/>'
    return f'<svg class="swatch" viewBox="0 0 28 10" width="28" height="10" aria-hidden="true">{line}</svg>'


def kl_distribution(
    series: Sequence[Series], noise: Column | None, floor: Sequence[tuple[str, float | None]] = ()
) -> str | None:
    """Share of targets by KL on a logarithmic axis; the noise floor of the baseline is drawn behind the curves."""
    drawn = [s.finite for s in series]
    behind = None if noise is None else noise.where(np.isfinite)
    positive = Column.joined(*drawn, *([behind] if behind else [])).where(lambda values: values > 0)
    if not positive.count:
        return None
    low = 10.0 ** math.floor(max(-12.0, math.log10(positive.quantile(0.005))))
    high = 10.0 ** math.ceil(math.log10(positive.largest) + 1e-9)
    axis = logarithmic(low, max(high, low * 10), "KL, nats per token")
    title = "How far predictions moved"
    text = "Share of tokens by KL divergence from the baseline, on a logarithmic axis."
    return _histogram(title, text, series, drawn, axis, noise=behind, lines=floor, cut_low=low)


def delta_distribution(series: Sequence[Series]) -> str | None:
    """Share of targets by Δ logprob: linear near zero, logarithmic in the tails."""
    drawn = [s.finite for s in series]
    sizes = Column.joined(*drawn).absolute()
    if not sizes.largest > 0:
        return None
    middle = max(sizes.quantile(0.5), sizes.largest * 1e-4)
    axis = both_ways(10.0 ** math.floor(math.log10(middle)), sizes.largest * 1.05, "Δ logprob, nats")
    title = "How the text's own tokens changed"
    text = "Share of tokens by change in log-probability; left of zero, they became less likely."
    return _histogram(title, text, series, drawn, axis, lines=[("", 0.0)])


def surprise_distribution(series: Sequence[Series]) -> str | None:
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
    drawn: Sequence[Column],
    axis: Axis,
    *,
    noise: Column | None = None,
    lines: Sequence[tuple[str, float | None]] = (),
    cut_low: float = 0.0,
) -> str:
    shares = [_shares(values, axis, cut_low) for values in drawn]
    noise_shares = _shares(noise, axis, cut_low) if noise is not None else None
    # a floor with many exact zeros must not flatten the curves of the candidates, so it may exceed the top
    top = max((float(s.max()) for s in shares if len(s)), default=0.0) or 1.0
    up = linear(0, top * 1.06, "share of tokens", count=4, write=lambda v: f"{plain(100 * v)}%")
    parts = []
    if noise_shares is not None:
        parts.append(f'<path class="noise" d="{_steps(noise_shares, up, closed=True)}"/>')
    for name, value in lines:
        if value is not None and math.isfinite(value) and (value > cut_low or not cut_low):
            parts.append(_upright(float(axis.place(value)), name))
    parts += [
        f'<path {style_of(i)} d="{_steps(s, up)}"><title>{escaped(series[i].name)}</title></path>'
        for i, s in enumerate(shares)
    ]
    return _chart(title, text, axis, up, parts, first_sign="≤" if cut_low else "")


def _shares(column: Column, axis: Axis, cut_low: float) -> Floats:
    """Share of the values in each bin; values beyond an end count in the outermost bin."""
    counts = np.zeros(BINS, np.int64)
    for values in column.blocks():
        within = np.maximum(values, cut_low) if cut_low else values
        index = np.clip((axis.place(within) * BINS).astype(np.int64), 0, BINS - 1)
        counts += np.bincount(index, minlength=BINS)
    shares: Floats = counts / max(1, int(counts.sum()))
    return shares


def _steps(shares: Floats, up: Axis, *, closed: bool = False) -> str:
    points = []
    for i, share in enumerate(shares.tolist()):
        height = _y(min(1.02, float(up.place(share))))
        points += [f"{_x(i / BINS):.1f} {height:.1f}", f"{_x((i + 1) / BINS):.1f} {height:.1f}"]
    if closed:
        points = [f"{_x(0):.1f} {_y(0):.1f}", *points, f"{_x(1):.1f} {_y(0):.1f}"]
    return "M" + "L".join(points) + ("Z" if closed else "")


def along_the_window(title: str, text: str, series: Sequence[Series], label: str) -> str | None:
    """Mean per stretch of the window, with the standard error over its groups as a band."""
    last = max((int(position.max()) for s in series for position, _ in s.places() if len(position)), default=0)
    if last < 2:
        return None
    bins = min(POSITION_BINS, last + 1)
    edges = np.linspace(0, last + 1, bins + 1)
    middle = (edges[1:] + edges[:-1]) / 2
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
    parts = [_level(float(up.place(0.0)))] if low < 0 < high else []
    parts += [_band(along.place(middle), up.place(m - e), up.place(m + e), i) for i, (m, e) in enumerate(curves)]
    for i, (mean, _) in enumerate(curves):
        line = _line(along.place(middle), up.place(mean))
        parts.append(f'<path {style_of(i)} d="{line}"><title>{escaped(series[i].name)}</title></path>')
    return _chart(title, text, along, up, parts)


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


def _chart(title: str, text: str, along: Axis, up: Axis, parts: Sequence[str], *, first_sign: str = "") -> str:
    grid = []
    for place, label in up.marks():
        y = _y(place)
        grid.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        grid.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escaped(label)}</text>')
    for i, (place, label) in enumerate(along.marks()):
        x = _x(place)
        sign = first_sign if i == 0 and place < 0.01 else ""
        grid.append(f'<path class="tick" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>')
        anchor = "end" if place > 0.97 else "middle"
        grid.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{escaped(sign + label)}</text>'
        )
    base = f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    name = f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
    unit = f'<text class="unit" x="4" y="12">{escaped(up.label)}</text>'
    return (
        f'<figure class="chart"><figcaption><strong>{escaped(title)}</strong> <span>{escaped(text)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(f"{title}. {text}")}">'
        f"{unit}{''.join(grid)}{base}{''.join(parts)}"
        f"{name}{escaped(along.label)}</text></svg></figure>"
    )


def _x(place: float) -> float:
    return LEFT + place * (WIDTH - LEFT - RIGHT)


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def _upright(place: float, name: str) -> str:
    if not 0 <= place <= 1:
        return ""
    x = _x(place)
    line = f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
    if not name:
        return line
    anchor, at = ("start", x + 4) if place < 0.6 else ("end", x - 4)
    return line + f'<text class="note" x="{at:.1f}" y="{TOP + 9}" text-anchor="{anchor}">{escaped(name)}</text>'


def _level(place: float) -> str:
    return f'<path class="mark" d="M{LEFT} {_y(place):.1f}H{WIDTH - RIGHT}"/>'


def _line(along: Floats, up: Floats) -> str:
    good = np.isfinite(up)
    return "M" + "L".join(f"{_x(float(x)):.1f} {_y(float(y)):.1f}" for x, y in zip(along[good], up[good], strict=True))


def _band(along: Floats, low: Floats, high: Floats, index: int) -> str:
    good = np.isfinite(low) & np.isfinite(high)
    if not good.any():
        return ""
    there = _line(along[good], high[good])
    back = _line(along[good][::-1], low[good][::-1])
    return f'<path class="band s{index % SERIES}" d="{there}L{back[1:]}Z"/>'
