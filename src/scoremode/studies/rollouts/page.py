"""Texts that a model wrote, on pages: a section on candidates that read them, and the page of a mismatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from scoremode.reports.html.drawing import SMALL, Chart, Shape, linear, plain
from scoremode.reports.html.page import ResultPage
from scoremode.reports.html.templating import fill, fill_page
from scoremode.reports.table import Note
from scoremode.studies.rollouts.mismatch import Mismatch
from scoremode.studies.rollouts.parting import Partings
from scoremode.studies.rollouts.readings import Reading
from scoremode.studies.rollouts.tables import mismatch_blocks, readings_blocks

POINTS = 96  # lengths at which survival is drawn


def readings_section(words: Sequence[Reading]) -> Markup:
    """What rollouts say about candidates; empty if there are no readings."""
    parted = [(i, one.reader, one.partings) for i, one in enumerate(words) if one.partings is not None]
    if not (blocks := readings_blocks(words)):
        return Markup()
    chart = _survival(parted)
    names = [one.reader for one in words]
    figures = [] if chart is None else [chart]
    return fill("readings.html", writer=words[0].writer, names=names, figures=figures, blocks=blocks)


def _survival(found: Sequence[tuple[int, str, Partings]]) -> Chart | None:
    """A line of steps for each candidate, and its bounds as a band."""
    longest = max((int(one.length.max(initial=0)) for *_, one in found), default=0)
    if not longest:
        return None
    lengths = np.unique(np.linspace(0, longest, min(POINTS, longest) + 1).round().astype(int)).tolist()
    along = linear(0, longest, "tokens of the text")
    up = linear(0.0, 1.0, "texts without a parting", count=4, write=lambda v: f"{plain(100 * v)}%")
    bands, lines = list[Shape](), list[Shape]()
    for series, name, one in found:
        survival = one.survival()
        known = [length for length in lengths if length <= survival.longest]
        ends = [*known[1:], min(longest, survival.longest)]
        pieces = zip(known, ends, map(survival.at, known), strict=True)
        corners = [(float(along.place(x)), e) for begin, end, e in pieces for x in (begin, end)]
        # no text parts before its first token: the first step has no bounds
        bounded = [(x, e.low, e.high) for x, e in corners[2:] if e.low is not None and e.high is not None]
        if bounded:
            there = [(x, float(up.place(high))) for x, _, high in bounded]
            back = [(x, float(up.place(low))) for x, low, _ in reversed(bounded)]
            bands.append(Shape("band", f"{SMALL.path([*there, *back])}Z", series))
        lines.append(Shape("line", SMALL.path((x, float(up.place(e.value))) for x, e in corners), series, name))
    text = "Share of texts without a parting so far (Kaplan-Meier), with 95 % bounds."
    return Chart("Where candidates part", text, along, up, [*bands, *lines])


def render_mismatch(found: Mismatch) -> str:
    s = found.statistics()
    title, *blocks = mismatch_blocks(s, found.by_position(), found.by_slice())
    assert isinstance(title, Note), "the name of the result"
    return fill_page("mismatch.html", title=title.text, tokens=s["tokens"], blocks=blocks)


REFUSAL = ("a mismatch has a page of its own", "write several reports")
PAGE = ResultPage(Mismatch, lambda found: render_mismatch(found[0]), REFUSAL)
