"""The chart of recovery: one line per task, a mark and its 95 % bounds for each candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scoremode.report.html.charts import SERIES, Axis, escaped, linear, style_of
from scoremode.report.html.numbers import written
from scoremode.report.text import middle_cut

LINE, MARK = 16.0, 9.0  # height of a line of text; space for each candidate's mark
TOP, BOTTOM, RIGHT = 8.0, 28.0, 22.0
LEAST, MOST = 0.0, 2.0  # a recovery beyond is drawn at the edge


@dataclass(frozen=True, slots=True)
class Mark:
    """Recovery of one candidate on one task."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """A task, a group, or all of them, with one mark per candidate."""

    name: str
    strong: bool
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """A drawing: its kind in the style sheet, its width, and the space for names."""

    kind: str
    width: float
    left: float
    axis: Axis

    def x(self, value: float) -> float:
        """Where a value stands; one beyond the axis stands at its end."""
        place = min(1.0, max(0.0, float(self.axis.place(value))))
        return self.left + place * (self.width - self.left - RIGHT)


def recovery_chart(lines: Sequence[Line], names: Sequence[str]) -> str:
    """The chart for a desktop and for a phone; the style sheet shows the one that fits. '' if nothing can be drawn."""
    known = [mark for line in lines for mark in line.marks if mark.value is not None]
    if not known:
        return ""
    axis = _axis(known)
    title, text = "Recovery", "Candidate divided by baseline, with 95% bounds. At 100% nothing was lost on balance."
    frames = (Frame("wide", 760.0, 200.0, axis), Frame("narrow", 380.0, 120.0, axis))
    drawn = "".join(_drawing(lines, names, frame) for frame in frames)
    return (
        f'<div class="plane"><figure class="chart"><figcaption><strong>{title}</strong> <span>{escaped(text)}</span>'
        f"</figcaption>{drawn}</figure></div>"
    )


def _axis(known: Sequence[Mark]) -> Axis:
    ends = [e for m in known for e in (m.value, m.low, m.high) if e is not None and math.isfinite(e)]
    low, high = max(LEAST, min([1.0, *ends])), min(MOST, max([1.0, *ends]))
    room = max(0.005, (high - low) * 0.05)
    return linear(low - room, high + room, "recovery", count=5, write=lambda v: f"{100 * v:.4g}%")


def _drawing(lines: Sequence[Line], names: Sequence[str], frame: Frame) -> str:
    each = max(LINE + 6, MARK * len(names) + 10)
    bottom = TOP + each * len(lines)
    parts = []
    for value, label in frame.axis.ticks:
        x = frame.x(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escaped(label)}</text>')
    parts.append(f'<path class="mark" d="M{frame.x(1.0):.1f} {TOP}V{bottom}"/>')
    for i, line in enumerate(lines):
        middle = TOP + each * (i + 0.5)
        strong = ' class="name"' if line.strong else ""
        name = middle_cut(line.name, int(frame.left / 7.2))
        label = f'<text{strong} x="{frame.left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escaped(name)}'
        parts.append(f"{label}<title>{escaped(line.name)}</title></text>")
        first = middle - MARK * (len(line.marks) - 1) / 2
        for j, mark in enumerate(line.marks):
            parts.append(_mark(mark, f"{line.name}, {names[j]}", frame, (first + MARK * j, j)))
    return (
        f'<svg class="{frame.kind}" viewBox="0 0 {frame.width:.0f} {bottom + BOTTOM:.0f}" role="img" '
        f'aria-label="Recovery of each task with its 95% bounds">{"".join(parts)}</svg>'
    )


def _mark(mark: Mark, name: str, frame: Frame, at: tuple[float, int]) -> str:
    """A mark at a height, in the colour of the candidate of that number."""
    if mark.value is None:
        return ""
    y, number = at
    bar = said = ""
    if mark.low is not None and mark.high is not None:
        bar = f'<path {style_of(number)} d="M{frame.x(mark.low):.1f} {y:.1f}H{frame.x(mark.high):.1f}"/>'
        said = f", 95%: {written(mark.low, percent=True)[0]} to {written(mark.high, percent=True)[0]}"
    title = escaped(f"{name}: {written(mark.value, percent=True)[0]}{said}")
    dot = f'<circle class="dot" cx="{frame.x(mark.value):.1f}" cy="{y:.1f}" r="3.6"/>'
    return f'<g class="s{number % SERIES}">{bar}{dot}<title>{title}</title></g>'
