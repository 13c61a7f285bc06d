"""The chart of recovery: one line per task, a mark and its 95 % bounds for each candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from scoremode.report.html.drawing import Frame, linear
from scoremode.report.html.templating import fill
from scoremode.report.numbers import written

LINE, MARK = 16.0, 9.0  # height of a line of text; space for each candidate's mark
LEAST, MOST = 0.0, 2.0  # a recovery beyond is drawn at the edge


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery of one candidate on one task."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def bounds(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    def __str__(self) -> str:
        value, low, high = (written(number, percent=True)[0] for number in (self.value, self.low, self.high))
        return value + (f", 95%: {low} to {high}" if self.bounds else "")


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
        Frame(kind, width, each * len(lines) + 36, left, right=22, top=8, bottom=28, longest=int(left / 7.2))
        for kind, width, left in (("wide", 760, 200), ("narrow", 380, 120))
    ]
    return fill("recovery_chart.html", frames=frames, axis=axis, lines=lines, names=names, each=each, space=MARK)
