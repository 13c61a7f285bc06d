"""Axes, frames and shapes of charts. Templates write them as inline SVG, so that charts print and need no script.

Colours are CSS classes (``s0`` … ``s7`` for candidates), so that one drawing works in light mode, dark mode and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

SERIES = 8  # colours in the style sheet; further candidates use them again with a different dash
DASHES = ("", "6 3", "2 2.5", "9 3 2 3")
MARKS = (  # centred at 0 0, all of about the same area
    "M-5 0A5 5 0 1 1 5 0A5 5 0 1 1 -5 0Z",  # circle
    "M-4.6 -4.6H4.6V4.6H-4.6Z",  # square
    "M0 -6.2L5.9 4.4H-5.9Z",  # triangle
    "M0 -6.4L6.4 0L0 6.4L-6.4 0Z",  # diamond
    "M0 6.2L5.9 -4.4H-5.9Z",  # triangle, upside down
    "M-1.9 -6H1.9V-1.9H6V1.9H1.9V6H-1.9V1.9H-6V-1.9H-1.9Z",  # plus
    "M-3.2 -5.6H3.2L6.2 0L3.2 5.6H-3.2L-6.2 0Z",  # hexagon
    "M-4 -6L0 -2L4 -6L6 -4L2 0L6 4L4 6L0 2L-4 6L-6 4L-2 0L-6 -4Z",  # cross
)


def line_style(series: int) -> Markup:
    """Returns the attributes of a candidate's line: its colour and its dash."""
    dash = DASHES[(series + series // SERIES) % len(DASHES)]
    return Markup(f'class="line s{series % SERIES}"' + (f' stroke-dasharray="{dash}"' if dash else ""))


def mark_path(group: int) -> Markup:
    """Returns the attributes of a group's mark: shape and colour, a different pair for each of up to 56 groups."""
    return Markup(f'class="dot s{group % SERIES}" d="{MARKS[(group + group // SERIES) % len(MARKS)]}"')


@dataclass(frozen=True)
class Axis:
    """Maps values to positions between 0 and 1, and has the values of its labelled ticks."""

    place: Callable[[Any], Any]
    ticks: tuple[tuple[float, str], ...]
    label: str

    def marks(self) -> list[tuple[float, str]]:
        places = [(float(self.place(value)), text) for value, text in self.ticks]
        return [(p, text) for p, text in places if -1e-9 <= p <= 1 + 1e-9]


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a drawing and its margins. The style sheet shows the frame whose ``kind`` fits the screen."""

    kind: str = ""
    width: float = 380  # three charts fit side by side on a desktop screen, and on a phone the text stays readable
    height: float = 244
    left: float = 50
    right: float = 10
    top: float = 24
    bottom: float = 38

    def x(self, place: float) -> float:
        return self.left + place * (self.width - self.left - self.right)

    def y(self, place: float) -> float:
        return self.height - self.bottom - place * (self.height - self.top - self.bottom)

    def path(self, places: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in places)


SMALL = Frame()


@dataclass(frozen=True, slots=True)
class Shape:
    """A path in a chart, in the colour of a candidate if ``series`` is given."""

    kind: str  # its CSS class
    path: str
    series: int | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    text: str
    along: Axis
    up: Axis
    shapes: Sequence[Shape]
    frame: Frame = SMALL


def linear(low: float, high: float, label: str, *, count: int = 5, write: Callable[[float], str] | None = None) -> Axis:
    if not high > low:
        low, high = low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    values = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
    written = write or (lambda value: plain(value, step))
    return Axis(lambda v: (v - low) / (high - low), tuple((v, written(v)) for v in values), label)


def logarithmic(low: float, high: float, label: str) -> Axis:
    """Returns a logarithmic axis with ticks at whole powers of ten, few enough that their labels do not touch."""
    begin, end = math.log10(low), math.log10(high)
    powers = range(math.ceil(begin - 1e-9), math.floor(end + 1e-9) + 1)
    every = max(1, math.ceil(len(powers) / 7))
    ticks = tuple((10.0**p, power_of_ten(p)) for p in powers if p % every == 0)
    if len(ticks) < 2:  # the axis spans less than a decade, and powers of ten alone would leave it empty
        finer = [m * 10.0**p for p in range(math.floor(begin), math.ceil(end) + 1) for m in range(1, 10)]
        within = [v for v in finer if low <= v <= high]
        ticks = tuple((v, plain(v)) for v in within[:: math.ceil(len(within) / 5) or 1])
    return Axis(lambda v: (np.log10(v) - begin) / (end - begin), ticks, label)


def both_ways(unit: float, reach: float, label: str) -> Axis:
    """Returns a symmetric axis that is linear near zero and logarithmic beyond ``unit``."""
    far = math.asinh(reach / unit)
    powers = range(round(math.log10(unit)), math.floor(math.log10(reach) + 1e-9) + 1)
    every = max(1, math.ceil(len(powers) / 3))
    # near zero the labels would be too close together to read
    sizes = [10.0**p for p in powers if math.asinh(10.0**p / unit) / far > 0.22][::-1][::every]
    ticks = [(-s, "−" + plain(s)) for s in sizes] + [(0.0, "0")] + [(s, plain(s)) for s in sizes]
    return Axis(lambda v: (np.arcsinh(np.asarray(v) / unit) / far + 1) / 2, tuple(ticks), label)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def plain(value: float, step: float | None = None) -> str:
    """Writes a short number for an axis: 0.05, 1.002, 12,000, 3e−6."""
    if value == 0:
        return "0"
    if step is not None and step >= 1e-4:
        power = math.floor(math.log10(step) + 1e-9)
        digits = max(0, -power + (round(step / 10.0**power, 3) == 2.5))
        return f"{value:,.{digits}f}".replace("-", "−")
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    return f"{value:,.4g}".replace("-", "−")


def power_of_ten(power: int) -> str:
    if -3 < power < 4:
        return plain(10.0**power)
    return "10" + "".join("⁻" if c == "-" else "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(c)] for c in str(power))
