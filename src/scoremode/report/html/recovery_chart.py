"""The chart of recovery: one line per task, a mark and its 95 % bounds for each candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from scoremode.report.html.drawing import Axis, Frame, linear
from scoremode.report.html.templating import fill
from scoremode.report.numbers import written
from scoremode.report.text import middle_cut

LINE, MARK = 16.0, 9.0  # height of a line of text; space for each candidate's mark
LEAST, MOST = 0.0, 2.0  # a recovery beyond is drawn at the edge


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery of one candidate on one task."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        value, low, high = (written(number, percent=True)[0] for number in (self.value, self.low, self.high))
        return value + ("" if self.low is None or self.high is None else f", 95%: {low} to {high}")


class Line(NamedTuple):
    """A task, a group, or all of them, with one mark per candidate."""

    name: str
    strong: bool
    marks: tuple[Recovery, ...]


def recovery_chart(lines: Sequence[Line], names: Sequence[str]) -> Markup:
    """The chart for a desktop and for a phone; the style sheet shows the one that fits. '' if nothing can be drawn."""
    known = [mark for line in lines for mark in line.marks if mark.value is not None]
    if not known:
        return Markup()
    ends = [e for m in known for e in (m.value, m.low, m.high) if e is not None and math.isfinite(e)]
    low, high = max(LEAST, min([1.0, *ends])), min(MOST, max([1.0, *ends]))
    room = max(0.005, (high - low) * 0.05)
    axis = linear(low - room, high + room, "recovery", count=5, write=lambda v: f"{100 * v:.4g}%")
    each = max(LINE + 6, MARK * len(names) + 10)
    frames = [
        Frame(kind, width, each * len(lines) + 36, left, right=22, top=8, bottom=28)
        for kind, width, left in (("wide", 760, 200), ("narrow", 380, 120))
    ]
    drawings = [(frame, _ticks(axis, frame), _placed(lines, names, axis, frame, each)) for frame in frames]
    return fill("recovery_chart.html", drawings=drawings)


def _x(value: float, axis: Axis, frame: Frame) -> float:
    """Where a value stands; one beyond the axis stands at its end."""
    return frame.x(min(1.0, max(0.0, float(axis.place(value)))))


def _ticks(axis: Axis, frame: Frame) -> list[tuple[float, str]]:
    return [*((_x(value, axis, frame), label) for value, label in axis.ticks), (_x(1.0, axis, frame), "")]


def _placed(lines: Sequence[Line], names: Sequence[str], axis: Axis, frame: Frame, each: float) -> list[dict[str, Any]]:
    """Each line with its height, and the places of its marks."""
    found = []
    for i, line in enumerate(lines):
        middle = frame.top + each * (i + 0.5)
        marks = []
        for j, mark in enumerate(line.marks):
            if mark.value is not None:
                bounded = mark.low is not None and mark.high is not None
                ends = [_x(end, axis, frame) for end in (mark.low, mark.high) if bounded and end is not None]
                y = middle + MARK * (j - (len(line.marks) - 1) / 2)
                at = {"series": j, "x": _x(mark.value, axis, frame), "y": y, "ends": ends}
                marks.append({**at, "title": f"{line.name}, {names[j]}: {mark}"})
        short = middle_cut(line.name, int(frame.left / 7.2))
        found.append({"name": line.name, "short": short, "strong": line.strong, "y": middle, "marks": marks})
    return found
