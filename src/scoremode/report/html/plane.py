"""The chart of quality against size: one mark per candidate, error bars, the noise floor and the Pareto front.

It is drawn twice, wide for a desktop and narrow for a phone; the style sheet shows the one that fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scoremode.report.html.charts import SERIES, Axis, escaped, linear, logarithmic, plain
from scoremode.report.html.labels import Box, Spot, place_names, text_width
from scoremode.report.text import middle_cut
from scoremode.statistics.comparison import STATISTICS
from scoremode.statistics.ranking import pareto_front

DECADE = 8.0  # values that differ by this factor are drawn on a logarithmic axis
FAR_BELOW = 1e-3  # a noise floor further below the candidates would squeeze them together
LARGEST = 1e300
SHAPES = (  # around 0 0, of about the same area
    "M-5 0A5 5 0 1 1 5 0A5 5 0 1 1 -5 0Z",  # circle
    "M-4.6 -4.6H4.6V4.6H-4.6Z",  # square
    "M0 -6.2L5.9 4.4H-5.9Z",  # triangle
    "M0 -6.4L6.4 0L0 6.4L-6.4 0Z",  # diamond
    "M0 6.2L5.9 -4.4H-5.9Z",  # triangle, upside down
    "M-1.9 -6H1.9V-1.9H6V1.9H1.9V6H-1.9V1.9H-6V-1.9H-1.9Z",  # plus
    "M-3.2 -5.6H3.2L6.2 0L3.2 5.6H-3.2L-6.2 0Z",  # hexagon
    "M-4 -6L0 -2L4 -6L6 -4L2 0L6 4L4 6L0 2L-4 6L-6 4L-2 0L-6 -4Z",  # cross
)


@dataclass(frozen=True, slots=True)
class Measure:
    """What is drawn upwards."""

    name: str  # in the statistics
    choice: str  # on the switch
    label: str  # of the axis
    better: Literal["low", "high", "one", "none"]
    factor: float = 1.0

    def has_place(self, value: float) -> bool:
        """Can this be a value at all, and be drawn?"""
        least, most = {"low": (-1.0, LARGEST), "one": (1 / LARGEST, LARGEST), "high": (0.0, 1.0)}[self.better]
        return least <= value <= most

    def cost(self, value: float) -> float:
        """What less of is better."""
        if self.better == "one":
            return abs(math.log(value)) if value > 0 else math.inf
        return -value if self.better == "high" else value


MEASURES = tuple(
    Measure(s.name, *s.chart, s.better, 100.0 if s.percent else 1.0)
    for s in sorted(STATISTICS, key=lambda s: s.needs != "kl")  # the chart of the divergence comes first
    if s.chart is not None
)


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate in the plane, in the units of its axes."""

    name: str
    label: str  # the name as it stands beside the mark, perhaps shorter
    said: str  # all of its figures, shown when the mark is pointed at
    group: int
    size: float
    value: float
    stderr: float | None


@dataclass(frozen=True, slots=True)
class Frame:
    """A drawing: its size, its margins, the size of its text and the longest name in it."""

    kind: str
    width: float
    height: float
    left: float
    text: float
    longest: int
    right: float = 14
    top: float = 30
    bottom: float = 44

    def x(self, place: float) -> float:
        return self.left + place * (self.width - self.left - self.right)

    def y(self, place: float) -> float:
        return self.height - self.bottom - place * (self.height - self.top - self.bottom)

    @property
    def inside(self) -> Box:
        return Box(self.left + 2, self.top - 8, self.width - 2, self.height - self.bottom - 2)


FRAMES = (Frame("wide", 920, 430, 66, 13, 30), Frame("narrow", 360, 400, 50, 12.5, 20))


def mark(group: int, x: float = 0, y: float = 0) -> str:
    """The mark of a group: a shape and a colour of its own, up to 56 groups."""
    shape = SHAPES[(group + group // SERIES) % len(SHAPES)]
    place = f' transform="translate({x:.1f} {y:.1f})"' if x or y else ""
    return f'<path class="dot s{group % SERIES}" d="{shape}"{place}/>'


def mark_key(group: int) -> str:
    """The mark, for legends and tables."""
    size = 'viewBox="-8 -8 16 16" width="14" height="14"'
    return f'<svg class="swatch mark-key" {size} aria-hidden="true">{mark(group)}</svg>'


@dataclass(frozen=True, slots=True)
class Upwards:
    """The axis of the values."""

    axis: Axis
    log: bool

    def height(self, value: float) -> float:
        """Between 0 and 1; the ends of long error bars, and 0 on a logarithmic axis, are drawn on the edge."""
        if self.log and value <= 0:
            return 0.0
        return min(1.0, max(0.0, float(self.axis.place(value))))


@dataclass(frozen=True, slots=True)
class Plane:
    """The chart of one measure."""

    points: Sequence[Point]
    measure: Measure
    size_label: str
    floors: Sequence[float] = ()  # noise floors, if the measure has them: candidates may have been given different ones

    @property
    def floor(self) -> float | None:
        return max(self.floors, default=None)

    @property
    def front(self) -> list[int]:
        """The candidates that no other one beats, by size and by the measure; the smallest first."""
        return pareto_front([p.size for p in self.points], [self.measure.cost(p.value) for p in self.points])

    @property
    def along(self) -> Axis:
        sizes = [p.size for p in self.points]
        room = (max(sizes) - min(sizes)) * 0.08 or max(sizes) * 0.2
        return linear(max(0.0, min(sizes) - room), max(sizes) + room, self.size_label, count=8)

    @property
    def up(self) -> Upwards:
        values = [p.value for p in self.points if p.value > 0]
        log = self.measure.better != "high" and bool(values) and max(values) / min(values) >= DECADE
        return Upwards(self._logarithmic() if log else self._linear(), log)

    def _logarithmic(self) -> Axis:
        least = min(p.value for p in self.points if p.value > 0)
        ends = [p.value - (p.stderr or 0.0) for p in self.points]
        low = min([least, *(end for end in ends if end > least / 10)])
        if self.floor is not None and low * FAR_BELOW <= self.floor < low:
            low = self.floor
        high = max(p.value + (p.stderr or 0.0) for p in self.points)
        if self.measure.better == "one":  # the baseline is at 1
            low, high = min(low, 1.0), max(high, 1.0)
        return logarithmic(low / 1.8, min(high * 1.8, LARGEST), self.measure.label)

    def _linear(self) -> Axis:
        low = min(p.value - (p.stderr or 0.0) for p in self.points)
        high = max(p.value + (p.stderr or 0.0) for p in self.points)
        if self.measure.better == "low":
            low, high = min(0.0, low), max(high, self.floor or 0.0)
        elif self.measure.better == "one":  # the baseline is at 1
            low, high = min(low, 1.0), max(high, 1.0)
        room = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
        if self.measure.better == "high":
            return linear(low - room, max(high, min(high + room, 100.0)), self.measure.label)
        return linear(low - (0.0 if self.measure.better == "low" else room), high + room, self.measure.label)

    def drawing(self, frame: Frame, title: str) -> str:
        up = self.up
        places = [(frame.x(float(self.along.place(p.size))), frame.y(up.height(p.value))) for p in self.points]
        spots = self.names(frame)
        parts = [*_grid(frame, self.along, up.axis), *self._levels(frame), self._steps(frame, places)]
        parts += [self._bar(frame, up, p, x) for p, (x, _) in zip(self.points, places, strict=True)]
        for p, at, spot in zip(self.points, places, spots, strict=True):
            name = _name(middle_cut(p.label, frame.longest), at, spot) if spot else ""
            parts.append(
                f'<g class="point" tabindex="0" role="img" aria-label="{escaped(p.said)}"><title>{escaped(p.said)}'
                f'</title><circle class="hit" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="14"/>{mark(p.group, *at)}{name}</g>'
            )
        return (
            f'<svg class="{frame.kind}" viewBox="0 0 {frame.width:g} {frame.height:g}" role="group" '
            f'aria-label="{escaped(title)}">{"".join(parts)}</svg>'
        )

    def names(self, frame: Frame) -> list[Spot | None]:
        """Where each name is written; None if there is no room for it."""
        up = self.up
        places = [(frame.x(float(self.along.place(p.size))), frame.y(up.height(p.value))) for p in self.points]
        bars = []
        for p, (x, _) in zip(self.points, places, strict=True):
            ends = [frame.y(up.height(p.value + sign * (p.stderr or 0.0))) for sign in (1, -1)]
            bars.append(Box(x - 4, ends[0], x + 4, ends[1]))
        names = [middle_cut(p.label, frame.longest) for p in self.points]
        taken = [*bars, *self._along_steps(frame, places), *self._note(frame)[1]]
        return place_names(names, places, frame.text, frame.inside, taken)

    def _bar(self, frame: Frame, up: Upwards, p: Point, x: float) -> str:
        if not p.stderr:
            return ""
        high, low = (frame.y(up.height(p.value + sign * p.stderr)) for sign in (1, -1))
        ends = "".join(f"M{x - 3.5:.1f} {y:.1f}h7" for y in (high, low))
        return f'<path class="line bar s{p.group % SERIES}" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}"/>'

    def _steps(self, frame: Frame, places: Sequence[tuple[float, float]]) -> str:
        """The front: the best value that this size, or a smaller one, gives."""
        first, *others = [places[i] for i in self.front]
        path = f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in others)
        return f'<path class="front" d="{path}H{frame.x(1):.1f}"/>'

    def _along_steps(self, frame: Frame, places: Sequence[tuple[float, float]]) -> list[Box]:
        """The front as narrow boxes, so that names are not written on it."""
        corners = [places[i] for i in self.front]
        corners.append((frame.x(1), corners[-1][1]))
        found = []
        for (x, y), (right, below) in itertools.pairwise(corners):
            found.append(Box(x, y - 2, right, y + 2))
            found.append(Box(right - 2, min(y, below), right + 2, max(y, below)))
        return found

    def _level(self, frame: Frame) -> tuple[float, str] | None:
        """The height of the baseline or of the noise floor, and what is written beside its line."""
        up = self.up
        if self.measure.better == "one":
            return frame.y(up.height(1.0)), "the baseline: 1"
        if self.floor is None:
            return None
        words = f"noise floor{', at most' if min(self.floors) < self.floor else ''} {plain(self.floor)}"
        y = frame.y(up.height(self.floor))
        unseen = up.log and self.floor > 0 and y > frame.y(0) - 0.5
        return y, words + (", below this chart" if unseen else "")

    def _note(self, frame: Frame) -> tuple[str, list[Box]]:
        """The words beside that line, and the place that they take."""
        level = self._level(frame)
        if level is None:
            return "", []
        y = level[0] + frame.text if self.measure.better == "one" else level[0] - 4
        x = frame.x(1) - 3
        box = Box(x - text_width(level[1], frame.text), y - frame.text, x, y + 3)
        return f'<text class="note" x="{x:.1f}" y="{y:.1f}" text-anchor="end">{escaped(level[1])}</text>', [box]

    def _levels(self, frame: Frame) -> list[str]:
        """The noise floor, as an area; the baseline, as a line."""
        level = self._level(frame)
        if level is None:
            return []
        y, right, bottom = level[0], frame.x(1), frame.y(0)
        found = []
        if self.measure.better == "low" and y < bottom - 0.5:
            area = f'<rect class="noise" x="{frame.left:g}" y="{y:.1f}" width="{right - frame.left:.1f}" '
            found.append(f'{area}height="{bottom - y:.1f}"/>')
        if y < bottom - 0.5:
            found.append(f'<path class="mark" d="M{frame.left:g} {y:.1f}H{right:.1f}"/>')
        return [*found, self._note(frame)[0]]


def _name(text: str, at: tuple[float, float], spot: Spot) -> str:
    line = ""
    if spot.far:
        x = min(max(at[0], spot.box.left), spot.box.right)
        y = min(max(at[1], spot.box.top), spot.box.bottom)
        line = f'<path class="lead-line" d="M{at[0]:.1f} {at[1]:.1f}L{x:.1f} {y:.1f}"/>'
    place = f'x="{spot.x:.1f}" y="{spot.y:.1f}" text-anchor="{spot.anchor}"'
    return f'{line}<text class="name" {place}>{escaped(text)}</text>'


def _grid(frame: Frame, along: Axis, up: Axis) -> list[str]:
    right, bottom = frame.x(1), frame.y(0)
    parts = [f'<text class="unit" x="4" y="13">{escaped(up.label)}</text>']
    for place, label in up.marks():
        y = frame.y(place)
        parts.append(f'<path class="grid" d="M{frame.left:g} {y:.1f}H{right:.1f}"/>')
        parts.append(f'<text x="{frame.left - 6:g}" y="{y + 4:.1f}" text-anchor="end">{escaped(label)}</text>')
    for place, label in along.marks():
        x = frame.x(place)
        parts.append(f'<path class="tick" d="M{x:.1f} {bottom:.1f}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{escaped(label)}</text>')
    parts.append(f'<path class="axis" d="M{frame.left:g} {bottom:.1f}H{right:.1f}"/>')
    middle = (frame.left + right) / 2
    below = f'x="{middle:.1f}" y="{frame.height - 6:g}" text-anchor="middle"'
    return [*parts, f'<text class="label" {below}>{escaped(along.label)}</text>']
