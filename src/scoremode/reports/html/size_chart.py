"""Quality against size: one mark per candidate with its name, error bars, the noise floor and the Pareto front.

On a phone, and if there is no room for all names, marks have numbers; the legend above the drawing has their names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

from markupsafe import Markup

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.statistic import Statistic
from scoremode.reports.html.drawing import Axis, Frame, linear, logarithmic, plain
from scoremode.reports.html.templating import fill
from scoremode.reports.numbers import SHOWN, Statistics
from scoremode.reports.ranking import pareto_front
from scoremode.reports.served import ServedModel, are_variants, in_groups, served
from scoremode.reports.text import counted
from scoremode.values import rounded, usable

Missing = dict[str, list[str]]  # why candidates are not drawn, and their names

DECADE = 8.0  # values that differ by this factor are drawn on a logarithmic axis
FAR_BELOW = 1e-3  # a noise floor further below the candidates would squeeze them together
LARGEST = 1e300
PLACES = {"low": (-1.0, LARGEST), "one": (1 / LARGEST, LARGEST), "high": (0.0, 1.0)}  # values that can be drawn
CANNOT = "not a number that can be drawn"

MOST_NAMES = 12  # in a drawing
# places for a mark's text: its start (x from the mark, x in widths of the text), and its base line (y from the mark)
BESIDE = ((9, 0, -5), (-9, -1, -5), (9, 0, 14), (-9, -1, 14), (0, -0.5, -11), (0, -0.5, 20))

FRAME = Frame(width=560, height=380, left=62, right=14, top=30, bottom=48)
DRAWN = sorted((m for m in SHOWN if m.choice), key=lambda m: m.name != "kl_mean")  # the divergence comes first


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate in the chart, in the units of its axes."""

    number: int  # of the candidate, as the legend has it
    name: str
    said: str  # all of its figures, shown when the mark is pointed at
    mark: int  # its shape and colour: those of its group, or its own if there is only one group
    size: float
    value: float
    stderr: float | None
    link: str = ""  # where a click on the mark leads

    @property
    def ends(self) -> tuple[float, float]:
        """The upper and the lower end of its error bar."""
        return self.value + (self.stderr or 0.0), self.value - (self.stderr or 0.0)


def size_section(comparisons: Sequence[Comparison]) -> Markup:
    """The section with one chart per measure; '' for fewer than two candidates and for variants of one size."""
    facts = [served(c) for c in comparisons]
    if len(comparisons) < 2 or (are_variants(comparisons) and len({model.size for model in facts}) == 1):
        return Markup()
    charts = [size_chart(measure, comparisons) for measure in DRAWN]
    return fill(
        "size_section.html",
        charts=[(chart, missing) for chart, missing in charts if len(chart.points) > 1],
        impossible=[(chart, missing) for chart, missing in charts if len(chart.points) < 2],
        groups=legend([c.name for c in comparisons], facts),
    )


def legend(names: Sequence[str], facts: Sequence[ServedModel]) -> dict[str, list[tuple[int, str]]]:
    """The numbers and names of candidates by group, whose mark stands before them."""
    return {group: [(i + 1, names[i]) for i in members] for group, members in in_groups(facts).items()}


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


def chart_of(measure: Statistic, candidates: Sequence[Charted]) -> tuple[SizeChart, Missing]:
    """The chart of one measure, and the names that are missing from it, by reason."""
    facts, statistics = [c.served for c in candidates], [c.statistics for c in candidates]
    by_bits = any(f.bits_per_weight is not None for f in facts)
    groups = list(in_groups(facts))
    name, (least, most) = measure.name, PLACES[measure.better]
    points: list[Point] = []
    missing: Missing = {}
    for number, (candidate, s, f) in enumerate(zip(candidates, statistics, facts, strict=True), start=1):
        size = f.bits_per_weight if by_bits else f.size / 2**30 if f.size else None
        value, error = usable(s.get(name)), usable(s.get(f"{name}_stderr"))
        if size is None:
            missing.setdefault(f"{'bits per weight' if by_bits else 'size'} not known", []).append(candidate.name)
        elif value is None or not least <= value <= most:
            missing.setdefault(candidate.why_missing, []).append(candidate.name)
        else:
            stderr = measure.factor * error if error is not None and 0 < error <= LARGEST else None
            shown = " ".join(rounded(s.get(name), s.get(f"{name}_stderr"), percent=measure.percent)).strip()
            label = f"{candidate.name}: {size:.2f} {'bits per weight' if by_bits else 'GiB'}, {measure.choice} {shown}"
            label += f" ({f.line})" if f.line else ""
            mark = groups.index(f.group) if len(groups) > 1 else number - 1
            at = mark, size, measure.factor * value, stderr
            points.append(Point(number, candidate.name, label, *at, candidate.link))
    noise = [usable(s.get("noise_floor_kl_mean")) for s in statistics] if name == "kl_mean" else []
    floors = [floor for floor in noise if floor is not None and 0 <= floor <= LARGEST]
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

    @cached_property
    def places(self) -> list[tuple[float, float]]:
        return [(FRAME.x(float(self.along.place(p.size))), FRAME.y(self.height(p.value))) for p in self.points]

    @cached_property
    def names(self) -> list[tuple[float, float, str]]:
        """Where the name of each mark stands, without the beginning that all share if else one has no room."""
        names = [point.name for point in self.points]
        pieces = zip(*(re.split(r"(?<=[-_./ ])", name) for name in names), strict=False)
        same = sum(len(first) for first, *_ in takewhile(lambda alike: len(set(alike)) == 1, pieces))
        for texts in (names, [f"…{name[same:]}" for name in names]) if len(names) <= MOST_NAMES else ():
            if len(positions := self._beside(texts, 6.7, 11)) == len(names):
                return positions
        return []

    @cached_property
    def numbers(self) -> list[tuple[float, float, str]]:
        """The position of each mark's number. If there is no room for all, numbers may cover marks or each other."""
        texts = [str(point.number) for point in self.points]
        positions, usual = self._beside(texts, 11, 16), zip(self.places, texts, strict=True)
        return positions if len(positions) == len(texts) else [(x + 9, y - 5, text) for (x, y), text in usual]

    def _beside(self, texts: Sequence[str], letter: float, height: float) -> list[tuple[float, float, str]]:
        """Where texts begin so that none covers a mark or another text, without those that have no room."""
        positions, taken = list[tuple[float, float, str]](), [(x - 7, y - 7, x + 7, y + 7) for x, y in self.places]
        if (level := self._level()) is not None:
            taken.append((FRAME.x(1) - letter * len(level[1]), level[0] - 16, FRAME.x(1), level[0]))
        for text, (x, y) in zip(texts, self.places, strict=True):
            for right, widths, down in BESIDE:
                left, base = x + right + widths * letter * len(text), y + down + (height - 11) * (down > 0)
                end, top, bottom = left + letter * len(text), base - height, base + 3
                inside = FRAME.left < left and end < FRAME.width and top > 14 and bottom < FRAME.y(0)
                if inside and not any(left < e and b < end and top < d and u < bottom for b, u, e, d in taken):
                    positions.append((left, base, text))
                    taken.append((left, top, end, bottom))
                    break
        return positions

    def drawing(self, title: str) -> Markup:
        corners = [self.places[i] for i in self.front]
        path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners[1:])
        return fill(
            "size_chart.html",
            chart=self,
            frame=FRAME,
            title=title,
            front=f"{path}H{FRAME.x(1):.1f}",
            level=self._level(),
            points=list(zip(self.points, self.places, strict=True)),
        )

    def _level(self) -> tuple[float, str] | None:
        """The height of the line that shows the baseline or the noise floor, and its words; None if there is neither.

        A noise floor below the axis has words alone.
        """
        if self.measure.better == "one":
            return FRAME.y(self.height(1.0)), "the baseline: 1"
        if self.floor is None:
            return None
        y = FRAME.y(self.height(self.floor))
        unseen = self.log and self.floor > 0 and y > FRAME.y(0) - 0.5
        at_most = ", at most" if min(self.floors) < self.floor else ""
        return y, f"noise floor{at_most} {plain(self.floor)}" + (", below this chart" if unseen else "")
