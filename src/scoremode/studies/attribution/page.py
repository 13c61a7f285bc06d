"""The HTML page of an attribution: its tables, a map of layers and matrices, bars with errors, profiles.

It needs no script: figures are shown as titles when the pointer rests on a cell or a bar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from scoremode.reports.html.drawing import SMALL, Axis, Chart, Frame, Shape, linear, logarithmic, plain
from scoremode.reports.html.page import ResultPage
from scoremode.reports.html.templating import fill, fill_page
from scoremode.reports.table import Note, estimate
from scoremode.studies.attribution.depth_profile import DepthPoint, DepthProfile
from scoremode.studies.attribution.result import Attribution, CandidateDamage, UnitDamage
from scoremode.studies.attribution.tables import (
    account_facts,
    attribution_notes,
    candidate_bits,
    depth_profile_notes,
    recipe_blocks,
    units_table,
)
from scoremode.values import Estimate, Floats

DECADES = 2  # of the colours of a map: a hundredth of the largest, and less, is almost white
WIDE, NARROW = ("wide", 760.0), ("narrow", 380.0)
LEAST = 1e-9  # smaller errors, and errors of exactly zero, are drawn at the lower end
DOT = 2.2  # radius of a point


# ── charts of a profile by layer ─────────────────────────────────────────────────────────────────────────────────────
def depth_profile_section(found: DepthProfile) -> Markup:
    notes = [note.text for note in depth_profile_notes(found)]
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


def _chart(title: str, text: str, along: Axis, values: Sequence[Estimate], places: Sequence[DepthPoint]) -> Chart:
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
        Shape("dot", _dot(*at), 0, f"{places[i].name}: {_words(e)}") for at, (i, e) in zip(line, points, strict=True)
    ]
    shapes = [Shape("band", f"{SMALL.path(band)}Z", 0), Shape("line", SMALL.path(line), 0, title), *dots]
    return Chart(title, text, along, up, shapes)


def _height(up: Axis, value: float) -> float:
    """The height of a value; one below the axis, such as zero, is drawn at its lower end."""
    return max(0.0, float(up.place(max(value, LEAST))))


def _dot(x: float, y: float) -> str:
    at_x, at_y = SMALL.x(x), SMALL.y(y)
    return f"M{at_x - DOT:.1f} {at_y:.1f}a{DOT} {DOT} 0 1 1 {2 * DOT} 0a{DOT} {DOT} 0 1 1 {-2 * DOT} 0Z"


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def render_attribution(found: Attribution, profiles: Sequence[DepthProfile] = (), more: Sequence[str] = ()) -> str:
    facts = found.as_json()
    candidates = []
    for own, c in zip(found.candidates, facts["candidates"], strict=True):
        account = account_facts(c)
        account.line("size", candidate_bits(c))
        drawn = {"maps": _maps(found, own), "bars": _bars(found, own)}
        candidates.append({"name": own.name, "account": account, "units": units_table(c), **drawn})
    recipe = facts.get("recipe")
    there = {"map": any(c["maps"] for c in candidates), "recipe": recipe is not None, "charts": bool(profiles)}
    return fill_page(
        "attribution.html",
        title=f"Where {', '.join(c.name for c in found.candidates)} differs from {found.baseline}",
        facts=facts,
        candidates=candidates,
        notes=[Note(line) for line in (*attribution_notes(facts), *more)],
        profiles=[depth_profile_section(profile) for profile in profiles],
        recipe=recipe_blocks(recipe) if recipe is not None else [],
        chosen={} if recipe is None else recipe["chosen"],
        left_out=[name for name, is_there in there.items() if not is_there],
    )


def render_profile(found: DepthProfile) -> str:
    title = f"{found.names[1]} against {found.names[0]}, layer by layer"
    return fill_page("profile.html", title=title, verdict=found.verdict, profile=depth_profile_section(found))


def figures(found: Attribution, one: UnitDamage) -> str:
    """All figures of a unit, for a title."""
    if not one.damage.is_changed:
        return f"{one.name}: the baseline's own weights"
    moved, same = found.cells.mean(one.damage.moved), found.cells.mean(one.damage.same, within="share")
    said = [
        f"{one.name}: KL {_words(found.kl(one))}",
        f"Δ log-probability {_words(moved)}",
        f"same first choice {estimate(same, percent=True).words}",
        *([f"{one.bits:.2f} bits per weight ({one.format})"] if one.bits_saved > 0 else []),
    ]
    each = found.kl_per_gigabit(one)
    return "\n".join(said if each is None else [*said, f"KL per Gbit saved {_words(each)}"])


def _words(e: Estimate) -> str:
    return estimate(e).words.replace("-", "−")


# ── the map ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _maps(found: Attribution, candidate: CandidateDamage) -> list[Markup]:
    """Layers × matrices, by KL and by KL per bit saved; nothing if units are not matrices."""
    units = [one for one in candidate.units if one.layer is not None and one.kind is not None]
    if not units:
        return []
    text = "Nats per token, alone in the baseline."
    drawn = [_map(found, units, "KL of each matrix", text, {one.name: found.kl(one) for one in units})]
    per_bit = {one.name: found.kl_per_gigabit(one) for one in units}
    if any(kl is not None and kl.value for kl in per_bit.values()):
        text = "Nats per token for each 10⁹ bits that it saves: the deepest colours are the first to keep."
        drawn.append(_map(found, units, "KL per Gbit saved", text, per_bit))
    return drawn


def _map(
    found: Attribution, units: Sequence[UnitDamage], title: str, text: str, kl: Mapping[str, Estimate | None]
) -> Markup:
    idle = {one.kind for one in units} - {one.kind for one in units if one.damage.is_changed}
    units = [one for one in units if one.kind not in idle or len(idle) == len({one.kind for one in units})]
    kinds, layers = (list(dict.fromkeys(getattr(one, name) for one in units)) for name in ("kind", "layer"))
    values = [None if (known := kl[one.name]) is None else known.value for one in units]
    largest = max((v for v in values if v is not None and math.isfinite(v)), default=0.0)
    width, left, right, top = 420.0, 34.0, 40.0, 64.0  # names of columns lean to the right
    cell, height = (width - left - right) / len(kinds), max(9.0, min(18.0, 520 / len(layers)))
    cells = [
        {
            "x": left + cell * kinds.index(one.kind),
            "y": top + height * layers.index(one.layer),
            "depth": depth(v, largest),
            "title": figures(found, one),
        }
        for one, v in zip(units, values, strict=True)
    ]
    every = max(1, math.ceil(11 / height))
    steps = [largest * 10.0**-power for power in range(DECADES, -1, -1)]
    return fill(
        "heat_map.html",
        title=title,
        text=text,
        width=width,
        height=top + height * len(layers) + 40,
        cell=cell,
        row=height,
        columns=[(left + cell * (i + 0.5), kind) for i, kind in enumerate(kinds)],
        rows=[(top + height * (i + 0.5), layer) for i, layer in enumerate(layers) if i % every == 0],
        top=top,
        left=left,
        cells=cells,
        scale=[(_two_digits(step), depth(step, largest)) for step in steps] if largest > 0 else [],
    )


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 100 else plain(float(f"{value:.2g}"))


def depth(value: float | None, largest: float) -> float | None:
    """How dark a value is, from 0 to 1, on a logarithmic scale; None if it is not known.

    >>> depth(1.0, 1.0), depth(0.001, 1.0), depth(0.0, 1.0), depth(None, 1.0)
    (1.0, 0.06, 0.0, None)
    """
    if value is None:
        return None
    if not largest > 0 or value <= 0:
        return 0.0
    if not math.isfinite(value):
        return 1.0
    place = 1 + math.log10(value / largest) / DECADES
    return round(0.06 + 0.94 * max(0.0, place), 3)


# ── bars ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _bars(found: Attribution, candidate: CandidateDamage) -> list[Markup]:
    """KL by layer and by kind of matrix, whatever the units are divided by; sums where there are several units."""
    charts = []
    for name, title in (("layer", "KL by layer"), ("kind", "KL by kind of matrix")):
        groups: dict[str, list[UnitDamage]] = {}
        for one in candidate.units:
            if not one.damage.is_changed:
                continue
            key = getattr(one, name)
            if key is not None or (name == "layer" and one.layer is None and one.kind is not None):
                groups.setdefault(str(one.kind if key is None else key), []).append(one)
        of_units = [units for units in groups.values() if name == "kind" or units[0].layer is not None]
        if found.by in (name, "matrix") and len(of_units) > 1:
            charts.append(_bar_chart(found, title, groups))
    return charts


def _bar_chart(found: Attribution, title: str, groups: Mapping[str, Sequence[UnitDamage]]) -> Markup:
    bars = []
    for name, units in groups.items():
        total: Floats = np.sum([one.damage.kl for one in units], axis=0)
        kl = found.cells.mean(total, within="positive")
        together = f"{name}, {len(units)} units: KL {_words(kl)}"
        bars.append((name, kl, figures(found, units[0]) if len(units) == 1 else together))
    finite = [b for _, kl, _ in bars for b in (kl.value, kl.high) if b is not None and math.isfinite(b)]
    axis = linear(0.0, max([*finite, 1e-12]) * 1.02, "KL, nats per token")
    noise = found.noise if found.noise is not None and found.noise < max([*finite, 0.0]) else None
    bottom = 96 if any(len(name) > 3 for name in groups) else 40  # room for long names
    several = any(len(units) > 1 for units in groups.values())
    text = (
        "Sums of units that were swapped alone" if several else "Each swapped alone"
    ) + ", with 95% bounds where there are enough groups."
    return fill(
        "bar_chart.html",
        title=title,
        text=text,
        bars=_placed(bars, axis),
        axis=axis,
        noise=noise,
        frames=[Frame(kind, width, 190 + bottom, 58, 10, 22, bottom) for kind, width in (WIDE, NARROW)],
    )


def _placed(bars: Sequence[tuple[str, Estimate, str]], axis: Axis) -> list[dict[str, Any]]:
    def place(value: float | None) -> float | None:
        return None if value is None else min(1.0, max(0.0, float(axis.place(value))))

    step = 1 / len(bars)
    return [
        {
            "name": name,
            "title": title,
            "middle": step * (i + 0.5),
            "half": step * 0.36,
            "top": place(kl.value) or 0.0,
            "low": place(kl.low),
            "high": place(kl.high),
        }
        for i, (name, kl, title) in enumerate(bars)
    ]


REFUSAL = ("an attribution has a page of its own", "write several reports")
PAGE = ResultPage(Attribution, lambda found: render_attribution(found[0]), REFUSAL)
