"""Texts that a model wrote, on pages: a section on candidates that read them, and the page of a mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from markupsafe import Markup

from scoremode.reports.html.charts import doubling
from scoremode.reports.html.drawing import SMALL, Axis, Chart, Shape, linear, plain
from scoremode.reports.html.page import ResultPage
from scoremode.reports.html.templating import fill, fill_page
from scoremode.reports.table import Note
from scoremode.studies.rollouts.mismatch import Mismatch
from scoremode.studies.rollouts.parting import Partings
from scoremode.studies.rollouts.readings import Reading
from scoremode.studies.rollouts.speculation import Speculation
from scoremode.studies.rollouts.tables import mismatch_blocks, readings_blocks
from scoremode.values import Estimate

POINTS = 96  # lengths at which survival is drawn

Piece = tuple[float, float, Estimate]
"""A stretch of the axis, and what is drawn above it."""


def readings_section(words: Sequence[Reading]) -> Markup:
    """What rollouts say about candidates; empty if there are no readings."""
    parted = [(i, one.reader, one.partings) for i, one in enumerate(words) if one.partings is not None]
    drafts = [(i, one.reader, one.drafts) for i, one in enumerate(words) if one.drafts is not None]
    if not (blocks := readings_blocks(words)):
        return Markup()
    charts = [_survival(parted), _acceptance(drafts), _tokens_per_step(drafts)]
    return fill(
        "readings.html",
        writer=words[0].writer,
        names=[one.reader for one in words],
        figures=[chart for chart in charts if chart is not None],
        blocks=blocks,
    )


def _survival(found: Sequence[tuple[int, str, Partings]]) -> Chart | None:
    longest = max((int(one.length.max(initial=0)) for *_, one in found), default=0)
    if not longest:
        return None
    lengths = np.unique(np.linspace(0, longest, min(POINTS, longest) + 1).round().astype(int)).tolist()
    curves = []
    for i, name, one in found:
        survival = one.survival()
        known = [length for length in lengths if length <= survival.longest]
        ends = [*known[1:], min(longest, survival.longest)]
        pieces = [(begin, end, survival.at(begin)) for begin, end in zip(known, ends, strict=True)]
        pieces[0] = (*pieces[0][:2], replace(pieces[0][2], low=None, high=None))  # no text parts before its first token
        curves.append((i, name, pieces))
    along = linear(0, longest, "tokens of the text")
    text = "Share of texts without a parting so far (Kaplan-Meier), with 95 % bounds."
    return _steps("Where candidates part", text, along, _percent(0.0, 1.0, "texts without a parting"), curves)


def _acceptance(found: Sequence[tuple[int, str, Speculation]]) -> Chart | None:
    if not any(len(one.by_position) > 1 for *_, one in found):
        return None
    edges = np.array([0, *sorted({end + 1 for *_, one in found for _, end, _ in one.by_position})])
    least = edges[1] / 2  # the first stretch is drawn as its second half
    each = [(i, name, one.by_position) for i, name, one in found]
    curves = [(i, name, [(max(least, first), end + 1, e) for first, end, e in own]) for i, name, own in each]
    text = "Share of drafted tokens that would be accepted, by position in the text, with 95 % bounds."
    lowest = min(e.value if e.low is None else e.low for *_, pieces in curves for *_, e in pieces)
    up = _percent(0.0 if lowest < 0.6 else max(0.0, lowest - 0.05), 1.0, "accepted")
    return _steps("Drafts along the text", text, doubling(edges, "position in the text"), up, curves)


def _tokens_per_step(found: Sequence[tuple[int, str, Speculation]]) -> Chart | None:
    if not found:
        return None
    curves = [(i, name, [(d.draft, d.draft, d.tokens_per_step) for d in one.drafts]) for i, name, one in found]
    most = max(draft.draft for *_, one in found for draft in one.drafts)
    high = max(e.value if e.high is None else e.high for *_, pieces in curves for *_, e in pieces)
    along = Axis(lambda v: (v - 0.5) / most, tuple((float(n), str(n)) for n in range(1, most + 1)), "drafted tokens")
    text = "Expected tokens per step of the target, for drafts of each length, with 95 % bounds."
    return _steps("What drafts would save", text, along, linear(1, max(2.0, high), "tokens per step", count=4), curves)


def _percent(low: float, high: float, label: str) -> Axis:
    return linear(low, high, label, count=4, write=lambda v: f"{plain(100 * v)}%")


def _steps(title: str, text: str, along: Axis, up: Axis, curves: Sequence[tuple[int, str, Sequence[Piece]]]) -> Chart:
    """Draws a line of steps for each candidate, and its bounds as a band."""
    bands, lines = list[Shape](), list[Shape]()
    for series, name, pieces in curves:
        corners = [(float(along.place(x)), e) for begin, end, e in pieces for x in (begin, end)]
        bounded = [(x, e) for x, e in corners if e.low is not None and e.high is not None]
        if bounded:
            there = [(x, _within(up, e.high or 0.0)) for x, e in bounded]
            back = [(x, _within(up, e.low or 0.0)) for x, e in reversed(bounded)]
            bands.append(Shape("band", f"{SMALL.path([*there, *back])}Z", series))
        lines.append(Shape("line", SMALL.path((x, _within(up, e.value)) for x, e in corners), series, name))
    return Chart(title, text, along, up, [*bands, *lines])


def _within(up: Axis, value: float) -> float:
    return min(1.0, max(0.0, float(up.place(value))))


def render_mismatch(found: Mismatch) -> str:
    s = found.statistics()
    title, *blocks = mismatch_blocks(s, found.by_position(), found.by_slice())
    assert isinstance(title, Note), "the name of the result"
    return fill_page("mismatch.html", title=title.text, tokens=s["tokens"], blocks=blocks)


REFUSAL = ("a mismatch has a page of its own", "write several reports")
PAGE = ResultPage(Mismatch, lambda found: render_mismatch(found[0]), REFUSAL)
