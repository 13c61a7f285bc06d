"""The HTML page of an attribution: its tables, and a map of layers and matrices, or bars with errors.

It needs no script: figures are shown as titles when the pointer rests on a cell or a bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from scoremode.reports.html.drawing import Frame, linear, plain
from scoremode.reports.html.page import ResultPage
from scoremode.reports.html.templating import fill, fill_page
from scoremode.reports.table import Block, Note, estimate
from scoremode.studies.attribution.result import Attribution, CandidateDamage, UnitDamage, ordered
from scoremode.studies.attribution.tables import (
    account_facts,
    attribution_notes,
    recipe_blocks,
    units_table,
)
from scoremode.values import Estimate

DECADES = 2  # of the colours of a map: a hundredth of the largest, and less, is almost white
WIDE, NARROW = ("wide", 760.0), ("narrow", 380.0)


def render_attribution(attribution: Attribution) -> str:
    candidates = []
    for candidate in attribution.candidates:
        account = account_facts(attribution, candidate)
        account.line("size", f"{candidate.bits_per_weight:.2f} bits per weight")
        drawing = _maps(attribution, candidate) if attribution.by == "matrix" else _bars(attribution, candidate)
        units = units_table(attribution, candidate, ordered(attribution, candidate.units))
        candidates.append({"name": candidate.name, "account": account, "units": units, "drawing": drawing})
    recipe = attribution.recipe
    return fill_page(
        "attribution.html",
        about=[
            ["attribution", attribution.by, attribution.baseline, attribution.facts, candidate.name]
            for candidate in attribution.candidates
        ],
        title=f"Where {', '.join(c.name for c in attribution.candidates)} differs from {attribution.baseline}",
        found=attribution,
        candidates=candidates,
        notes=[Note(line) for line in attribution_notes(attribution)],
        recipe=recipe_blocks(attribution, recipe) if recipe is not None else [],
        left_out=["recipe"] if recipe is None else [],
    )


def render_blocks(title: str, lead: str, blocks: Sequence[Block], about: object) -> str:
    """The page of a profile by layer, or of routes."""
    return fill_page("profile.html", about=[about], title=title, lead=lead, blocks=blocks)


def figures(attribution: Attribution, unit: UnitDamage) -> str:
    """The figures of a unit, for a title."""
    if not unit.damage.is_changed:
        return f"{unit.name}: the baseline's own weights"
    line, each = f"{unit.name}: KL {_words(attribution.kl(unit))}", attribution.kl_per_gigabit(unit)
    if each is None:
        return line
    return f"{line}\n{unit.bits:.2f} bits per weight ({unit.format})\nKL per Gbit saved {_words(each)}"


def _words(e: Estimate) -> str:
    return estimate(e).words.replace("-", "−")


def _maps(attribution: Attribution, candidate: CandidateDamage) -> Markup:
    """Layers × matrices, by KL, and by KL per bit saved where bits are saved."""
    units, text = [unit for unit in candidate.units if unit.layer is not None], "Nats per token, alone in the baseline."
    by_kl = _map(attribution, units, "KL of each matrix", text, list(map(attribution.kl, units)))
    saved = [(unit, kl) for unit in units if (kl := attribution.kl_per_gigabit(unit)) is not None]
    if not saved:
        return by_kl
    text = "Nats per token for each 10⁹ bits that it saves: the deepest colours are the first to keep."
    return by_kl + _map(attribution, [unit for unit, _ in saved], "KL per Gbit saved", text, [kl for _, kl in saved])


def _map(
    attribution: Attribution, units: Sequence[UnitDamage], title: str, text: str, kls: Sequence[Estimate]
) -> Markup:
    kinds, layers = (list(dict.fromkeys(getattr(unit, name) for unit in units)) for name in ("kind", "layer"))
    values = [kl.value for kl in kls]
    largest = max(filter(math.isfinite, values), default=0.0)
    width, left, right, top = 420.0, 34.0, 40.0, 64.0  # names of columns lean to the right
    cell, height = (width - left - right) / len(kinds), max(9.0, min(18.0, 520 / len(layers)))
    cells = [
        {
            "x": left + cell * kinds.index(unit.kind),
            "y": top + height * layers.index(unit.layer),
            "depth": depth(value, largest),
            "title": figures(attribution, unit),
        }
        for unit, value in zip(units, values, strict=True)
    ]
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
        rows=[(top + height * (i + 0.5), layer) for i, layer in enumerate(layers) if i % math.ceil(11 / height) == 0],
        top=top,
        left=left,
        cells=cells,
        scale=[(plain(float(f"{step:.2g}")), depth(step, largest)) for step in steps],
    )


def depth(value: float, largest: float) -> float:
    """How dark a value is, from 0 to 1, on a logarithmic scale.

    >>> depth(1.0, 1.0), depth(0.001, 1.0), depth(0.0, 1.0)
    (1.0, 0.06, 0.0)
    """
    if not largest > 0 or value <= 0:
        return 0.0
    if not math.isfinite(value):
        return 1.0
    return round(0.06 + 0.94 * max(0.0, 1 + math.log10(value / largest) / DECADES), 3)


def _bars(attribution: Attribution, candidate: CandidateDamage) -> Markup:
    """The KL of each layer, or of each kind of matrix."""
    units = candidate.units
    kls = [attribution.kl(unit) for unit in units]
    finite = [b for kl in kls for b in (kl.value, kl.high) if b is not None and math.isfinite(b)]
    axis, step = linear(0.0, max([*finite, 1e-12]) * 1.02, "KL, nats per token"), 1 / len(units)

    def place(value: float | None) -> float | None:
        return None if value is None else min(1.0, max(0.0, float(axis.place(value))))

    bars = [
        {
            "name": unit.name.removeprefix("layer "),
            "title": figures(attribution, unit),
            "middle": step * (i + 0.5),
            "half": step * 0.36,
            "top": place(kls[i].value),
            "low": place(kls[i].low),
            "high": place(kls[i].high),
        }
        for i, unit in enumerate(units)
    ]
    return fill(
        "bar_chart.html",
        title="KL by layer" if attribution.by == "layer" else "KL by kind of matrix",
        text="Each swapped alone, with 95% bounds where there are enough groups.",
        bars=bars,
        axis=axis,
        noise=attribution.noise if attribution.noise is not None and attribution.noise < max([*finite, 0.0]) else None,
        frames=[Frame(kind, width, 286, 58, 10, 22, bottom=96) for kind, width in (WIDE, NARROW)],
    )


REFUSAL = ("an attribution has a page of its own", "write several reports")
PAGE = ResultPage(lambda attributions: render_attribution(attributions[0]), REFUSAL)
