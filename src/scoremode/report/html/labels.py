"""Places for the names of marks in a chart, so that names cover neither each other nor the marks."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

DISTANCES = (9.0, 20.0, 33.0, 48.0)  # of a name from its mark
DIRECTIONS = ((1, 0), (-1, 0), (1, -1), (-1, -1), (1, 1), (-1, 1), (0, -1), (0, 1))
NEAR = 16.0  # further away, a line leads from the name to its mark
HIDDEN = 0.3  # the share of a name that may be covered before it is left out


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a drawing; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a name is written."""

    x: float
    y: float  # of the base line
    anchor: str  # of SVG text: start, middle or end
    box: Box
    far: bool  # a line leads to its mark


def text_width(text: str, size: float) -> float:
    """About how wide a text is drawn: fonts differ, so this is a little more than most need."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return size * (0.58 * (len(text) - wide) + 1.02 * wide)


def place_names(
    names: Sequence[str], marks: Sequence[tuple[float, float]], size: float, within: Box, taken: Sequence[Box] = ()
) -> list[Spot | None]:
    """A spot for each name, beside its mark; None if there is no room for it.

    ``taken`` is covered by other things, such as error bars. The most crowded marks choose first.
    """
    covered = [*(Box(x - 7, y - 7, x + 7, y + 7) for x, y in marks), *taken]
    found: list[Spot | None] = [None] * len(names)
    for i in sorted(range(len(names)), key=lambda i: _room(i, marks)):
        spots = [s for s in _spots(names[i], marks[i], size) if within.holds(s.box)]
        costs = [(sum(spot.box.overlap(box) for box in covered) / spot.box.area, n) for n, spot in enumerate(spots)]
        if costs and min(costs)[0] <= HIDDEN:
            found[i] = spots[min(costs)[1]]
            covered.append(spots[min(costs)[1]].box)
    return found


def _room(i: int, marks: Sequence[tuple[float, float]]) -> float:
    """The distance to the nearest other mark."""
    return min((math.dist(marks[i], other) for j, other in enumerate(marks) if j != i), default=math.inf)


def _spots(name: str, mark: tuple[float, float], size: float) -> list[Spot]:
    """Every spot that is tried, the best first."""
    found = []
    width = text_width(name, size)
    for distance in DISTANCES:
        for right, down in DIRECTIONS:
            reach = distance / math.hypot(right, down)
            x, middle = mark[0] + right * reach, mark[1] + down * (reach + (size / 2 if not right else 0))
            left = x if right > 0 else x - width if right < 0 else x - width / 2
            box = Box(left, middle - size * 0.6, left + width, middle + size * 0.6)
            anchor = ("middle", "start", "end")[right]
            found.append(Spot(x, middle + size * 0.35, anchor, box, distance > NEAR))
    return found
