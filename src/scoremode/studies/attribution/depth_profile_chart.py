"""Charts of a profile by layer: the error by depth with the noise floor, and what each layer adds itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from scoremode.reports.html.drawing import SMALL, Axis, Chart, Shape, linear, logarithmic
from scoremode.reports.html.templating import fill
from scoremode.studies.attribution.depth_profile import DepthProfile, Place
from scoremode.values import Estimate, rounded

LEAST = 1e-9  # smaller errors, and errors of exactly zero, are drawn at the lower end
DOT = 2.2  # radius of a point


def depth_profile_section(found: DepthProfile) -> Markup:
    """The charts as a section of a page, with the verdict and the notes."""
    facts = [found.verdict, "Hidden states after each decoder layer are compared, before the final norm."]
    notes = [*facts, f"Noise floor: the baseline against itself, {found.unusual_way}.", *found.notes]
    return fill("charts.html", names=[found.names[1]], figures=depth_profile_charts(found), noise=True, notes=notes)


def depth_profile_charts(found: DepthProfile) -> list[Chart]:
    """The error by depth with the noise floor behind it, and the own error of each layer."""
    places = found.places
    along = _layers(len(places) - 1)
    error = _chart("Error by depth", "Relative error of the hidden states.", along, [p.error for p in places], places)
    own = _chart("What each layer adds", "Own error of each layer.", along, [p.own_error for p in places], places)
    noise = [p.noise.value if p.noise is not None else math.nan for p in places]
    if any(value > 0 for value in noise):
        top = [(float(along.place(i)), _height(error.up, v)) for i, v in enumerate(noise) if not math.isnan(v)]
        area = SMALL.path([(top[0][0], 0.0), *top, (top[-1][0], 0.0)]) + "Z"
        error = Chart(error.title, error.text, along, error.up, [Shape("noise", area), *error.shapes])
    marks = []
    for place in found.out_of_line:
        at = float(along.place(places.index(place)))
        x, (anchor, shift) = SMALL.x(at), ("start", 4) if at < 0.6 else ("end", -4)
        marks.append(
            Shape("mark", f"M{x:.1f} {SMALL.top:g}V{SMALL.y(0):g}", note=(x + shift, SMALL.top + 9, anchor, place.name))
        )
    return [error, Chart(own.title, own.text, along, own.up, [*marks, *own.shapes])]


def _layers(count: int) -> Axis:
    every = max(1, math.ceil(count / 8))
    ticks = ((0.0, "emb."), *((float(i + 1), str(i)) for i in range(0, count, every) if i + 1 > count / 12))
    axis = linear(0, count, "layer")
    return Axis(axis.place, ticks, "layer")


def _chart(title: str, text: str, along: Axis, values: Sequence[Estimate], places: Sequence[Place]) -> Chart:
    floors = [p.noise.value for p in places if p.noise is not None] if values[0] is places[0].error else []
    seen = [max(v, LEAST) for v in (*(e.value for e in values), *floors) if math.isfinite(v) and v > 0] or [LEAST]
    low, high = 10.0 ** math.floor(math.log10(min(seen))), 10.0 ** math.ceil(math.log10(max(seen)) + 1e-9)
    up = logarithmic(low, max(high, 10 * low), "relative error")
    points = [(i, e) for i, e in enumerate(values) if math.isfinite(e.value)]
    line = [(float(along.place(i)), _height(up, e.value)) for i, e in points]
    if not line:
        return Chart(title, text, along, up, [])
    band = [
        (float(along.place(i)), _height(up, e.value + sign * (e.stderr or 0.0)))
        for sign, part in ((1, points), (-1, points[::-1]))
        for i, e in part
    ]
    dots = [
        Shape("dot", _dot(*at), 0, f"{places[i].name}: {' '.join(rounded(e.value, e.stderr)).rstrip()}")
        for at, (i, e) in zip(line, points, strict=True)
    ]
    shapes = [Shape("band", f"{SMALL.path(band)}Z", 0), Shape("line", SMALL.path(line), 0, title), *dots]
    return Chart(title, text, along, up, shapes)


def _height(up: Axis, value: float) -> float:
    """The height of a value; one below the axis, such as zero, is drawn at its lower end."""
    return max(0.0, float(up.place(max(value, LEAST))))


def _dot(x: float, y: float) -> str:
    at_x, at_y = SMALL.x(x), SMALL.y(y)
    return f"M{at_x - DOT:.1f} {at_y:.1f}a{DOT} {DOT} 0 1 1 {2 * DOT} 0a{DOT} {DOT} 0 1 1 {-2 * DOT} 0Z"
