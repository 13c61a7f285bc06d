"""Quality against size: one mark per candidate, error bars, the noise floor and the Pareto front.

It is drawn twice, wide for a desktop and narrow for a phone; the style sheet shows the one that fits.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from markupsafe import Markup

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.statistic import Statistic
from scoremode.reports.html.drawing import Axis, Frame, linear, logarithmic, plain
from scoremode.reports.html.templating import fill
from scoremode.reports.numbers import SHOWN, Statistics
from scoremode.reports.ranking import pareto_front
from scoremode.reports.served import ServedModel, are_variants, in_groups, served
from scoremode.reports.text import counted, middle_cut, without_common_start
from scoremode.values import rounded, usable

Missing = dict[str, list[str]]  # why candidates are not drawn, and their names
XY = tuple[float, float]  # x and y of a drawing; y grows downwards
Box = tuple[float, float, float, float]  # left, top, right and bottom

DECADE = 8.0  # values that differ by this factor are drawn on a logarithmic axis
FAR_BELOW = 1e-3  # a noise floor further below the candidates would squeeze them together
LARGEST = 1e300
CANNOT = "not a number that can be drawn"

DISTANCES = (9.0, 18.0)  # of a name from its mark
DIRECTIONS = ((1, 0), (-1, 0), (1, -1), (-1, -1), (1, 1), (-1, 1), (0, -1), (0, 1))

SCREENS = (
    Frame("wide", 920, 430, 66, 14, 30, 44, text=13, longest=30),
    Frame("narrow", 360, 400, 50, 14, 30, 44, text=12.5, longest=20),
)
DRAWN = sorted((m for m in SHOWN if m.choice), key=lambda m: m.name != "kl_mean")  # the divergence comes first


def has_place(measure: Statistic, value: float) -> bool:
    """Is this a possible value of the measure, and one that can be drawn?"""
    least, most = {"low": (-1.0, LARGEST), "one": (1 / LARGEST, LARGEST), "high": (0.0, 1.0)}[measure.better]
    return least <= value <= most


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate in the chart, in the units of its axes."""

    name: str
    label: str  # the name as it stands beside the mark, perhaps shorter
    said: str  # all of its figures, shown when the mark is pointed at
    group: int
    size: float
    value: float
    stderr: float | None
    link: str = ""  # where a click on the mark leads

    @property
    def ends(self) -> XY:
        """The upper and the lower end of its error bar."""
        return self.value + (self.stderr or 0.0), self.value - (self.stderr or 0.0)


def size_section(comparisons: Sequence[Comparison]) -> Markup:
    """The section with one chart per measure; '' for fewer than two candidates and for variants of one size."""
    facts = [served(c) for c in comparisons]
    if len(comparisons) < 2 or (are_variants(comparisons) and len({its.size for its in facts}) == 1):
        return Markup()
    found = [size_chart(measure, comparisons) for measure in DRAWN]
    return fill(
        "size_section.html",
        charts=[(chart, missing) for chart, missing in found if len(chart.points) > 1],
        impossible=[(chart, missing) for chart, missing in found if len(chart.points) < 2],
        groups=list(in_groups(facts)),
        screens=SCREENS,
    )


def size_chart(measure: Statistic, comparisons: Sequence[Comparison]) -> tuple[SizeChart, Missing]:
    """The chart of one measure, and the candidates that are missing from it, by reason."""
    return chart_of(
        measure, [Charted(c.name, c.statistics(), served(c), _why_missing(measure, c)) for c in comparisons]
    )


class Charted(NamedTuple):
    """What a chart needs to know of a candidate."""

    name: str
    statistics: Statistics
    served: ServedModel
    why_missing: str  # if it has no value
    link: str = ""


def chart_of(measure: Statistic, found: Sequence[Charted]) -> tuple[SizeChart, Missing]:
    """The chart of one measure, and the names that are missing from it, by reason."""
    facts, statistics = [one.served for one in found], [one.statistics for one in found]
    by_bits = any(f.bits_per_weight is not None for f in facts)
    groups = list(in_groups(facts))
    labels = without_common_start([one.name for one in found])
    name = measure.name
    points: list[Point] = []
    missing: Missing = {}
    for one, s, f, label in zip(found, statistics, facts, labels, strict=True):
        size = f.bits_per_weight if by_bits else f.size / 2**30 if f.size else None
        value, error = usable(s.get(name)), usable(s.get(f"{name}_stderr"))
        if size is None:
            missing.setdefault(f"{'bits per weight' if by_bits else 'size'} not known", []).append(one.name)
        elif value is None or not has_place(measure, value):
            missing.setdefault(one.why_missing, []).append(one.name)
        else:
            stderr = measure.factor * error if error is not None and 0 < error <= LARGEST else None
            shown = " ".join(rounded(s.get(name), s.get(f"{name}_stderr"), percent=measure.percent)).strip()
            said = f"{one.name}: {size:.2f} {'bits per weight' if by_bits else 'GiB'}, {measure.choice} {shown}"
            said += f" ({f.line})" if f.line else ""
            at = groups.index(f.group), size, measure.factor * value, stderr
            points.append(Point(one.name, label, said, *at, one.link))
    known = [usable(s.get("noise_floor_kl_mean")) for s in statistics] if name == "kl_mean" else []
    floors = [floor for floor in known if floor is not None and 0 <= floor <= LARGEST]
    return SizeChart(points, measure, "bits per weight" if by_bits else "size, GiB", floors), missing


def _why_missing(measure: Statistic, c: Comparison) -> str:
    if measure.name == "same_top":
        return "no share of first choices was measured"
    if measure.name == "ppl_ratio":
        return f"its perplexity ratio is {CANNOT}"
    if c.kl is None:
        return str(c.manifest.get("kl_missing") or "no KL")
    infinite = int(usable(c.statistics().get("kl_infinite")) or 0)
    return f"KL is infinite on {counted(infinite, 'tokens')}" if infinite else f"its KL is {CANNOT}"


@dataclass(frozen=True)
class SizeChart:
    points: Sequence[Point]
    measure: Statistic
    size_label: str
    floors: Sequence[float] = ()  # noise floors, if the measure has them: candidates may have been given different ones

    @property
    def floor(self) -> float | None:
        return max(self.floors, default=None)

    @cached_property
    def front(self) -> list[int]:
        """The candidates that no other one beats, by size and by the measure; the smallest first."""
        costs = [self.measure.cost(p.value) for p in self.points]
        return pareto_front([p.size for p in self.points], costs)

    @cached_property
    def along(self) -> Axis:
        sizes = [p.size for p in self.points]
        room = (max(sizes) - min(sizes)) * 0.08 or max(sizes) * 0.2
        return linear(max(0.0, min(sizes) - room), max(sizes) + room, self.size_label, count=8)

    @cached_property
    def log(self) -> bool:
        values = [p.value for p in self.points if p.value > 0]
        return self.measure.better != "high" and bool(values) and max(values) / min(values) >= DECADE

    @cached_property
    def up(self) -> Axis:
        better, label = self.measure.better, self.measure.axis
        high, low = max(p.ends[0] for p in self.points), min(p.ends[1] for p in self.points)
        if self.log:
            least = min(p.value for p in self.points if p.value > 0)
            low = min([least, *(p.ends[1] for p in self.points if p.ends[1] > least / 10)])
            if self.floor is not None and low * FAR_BELOW <= self.floor < low:
                low = self.floor
        elif better == "low":
            low, high = min(0.0, low), max(high, self.floor or 0.0)
        if better == "one":  # the baseline is at 1
            low, high = min(low, 1.0), max(high, 1.0)
        if self.log:
            return logarithmic(low / 1.8, min(high * 1.8, LARGEST), label)
        room = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
        top = max(high, min(high + room, 100.0)) if better == "high" else high + room
        return linear(low if better == "low" else low - room, top, label)

    def height(self, value: float) -> float:
        """The height of a value, from 0 to 1. Values beyond the axis, and 0 on a logarithmic axis, are on the edge."""
        if self.log and value <= 0:
            return 0.0
        return min(1.0, max(0.0, float(self.up.place(value))))

    @property
    def at_zero(self) -> list[str]:
        """Candidates whose value is 0 or less, for which a logarithmic axis has no place."""
        return [p.name for p in self.points if self.log and p.value <= 0]

    def drawing(self, frame: Frame, title: str) -> Markup:
        places = self._places(frame)
        corners = [places[i] for i in self.front]
        path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners[1:])
        return fill(
            "size_chart.html",
            chart=self,
            frame=frame,
            title=title,
            front=f"{path}H{frame.x(1):.1f}",
            level=self._level(frame),
            points=list(zip(self.points, places, self.names(frame), strict=True)),
        )

    def _places(self, frame: Frame) -> list[XY]:
        return [(frame.x(float(self.along.place(p.size))), frame.y(self.height(p.value))) for p in self.points]

    def names(self, frame: Frame) -> list[Spot | None]:
        """Where each name is written; None if there is no room for it."""
        level, names = self._level(frame), [middle_cut(p.label, frame.longest) for p in self.points]
        return place_names(names, self._places(frame), frame, [level.box] if level else [])

    def _level(self, frame: Frame) -> Level | None:
        """The line that shows the baseline or the noise floor; None if there is neither."""
        baseline = self.measure.better == "one"
        if not baseline and self.floor is None:
            return None
        value = 1.0 if baseline or self.floor is None else self.floor
        y = frame.y(self.height(value))
        unseen = self.log and value > 0 and y > frame.y(0) - 0.5
        words = "the baseline: 1"
        if not baseline:
            words = f"noise floor{', at most' if min(self.floors) < value else ''} {plain(value)}"
            words += ", below this chart" if unseen else ""
        base, right = y + frame.text if baseline else y - 4, frame.x(1) - 3
        return Level(y, words, (right - text_width(words, frame.text), base - frame.text, right, base + 3))


class Level(NamedTuple):
    """A line across the chart, and the words beside it."""

    y: float
    words: str
    box: Box


class Spot(NamedTuple):
    """Where a name is written."""

    x: float
    y: float  # of the base line
    anchor: str  # of SVG text: start, middle or end
    box: Box


def text_width(text: str, size: float) -> float:
    """About how wide a text is drawn: fonts differ, so this is a little wider than in most of them."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return size * (0.58 * (len(text) - wide) + 1.02 * wide)


def place_names(
    names: Sequence[str], marks: Sequence[XY], frame: Frame, taken: Sequence[Box] = ()
) -> list[Spot | None]:
    """The first spot beside each mark that covers no mark and no other name; None if there is none."""
    covered = [*((x - 6, y - 6, x + 6, y + 6) for x, y in marks), *taken]
    within = (frame.left, frame.top - 8, frame.width, frame.height - frame.bottom)
    found = list[Spot | None]()
    for name, mark in zip(names, marks, strict=True):
        tried = (s for s in _spots(name, mark, frame.text) if _is_inside(s.box, within))
        spot = next((s for s in tried if not any(_overlap(s.box, other) for other in covered)), None)
        covered += [spot.box] if spot else []
        found.append(spot)
    return found


def _spots(name: str, mark: XY, size: float) -> Iterator[Spot]:
    """The spots for a name that are tried, the best first."""
    width = text_width(name, size)
    for distance, (right, down) in itertools.product(DISTANCES, DIRECTIONS):
        x, middle = mark[0] + right * distance, mark[1] + down * (distance + (size / 2 if not right else 0))
        left = x if right > 0 else x - width if right < 0 else x - width / 2
        box = (left, middle - size * 0.6, left + width, middle + size * 0.6)
        yield Spot(x, middle + size * 0.35, ("middle", "start", "end")[right], box)


def _is_inside(box: Box, other: Box) -> bool:
    return box[0] >= other[0] and box[1] >= other[1] and box[2] <= other[2] and box[3] <= other[3]


def _overlap(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
