"""Texts that a model wrote, on pages: a section on candidates that read them, and the page of a mismatch."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from scoremode.reports.html.page import ResultPage
from scoremode.reports.html.templating import fill, fill_page
from scoremode.reports.table import Note
from scoremode.studies.rollouts.mismatch import Mismatch
from scoremode.studies.rollouts.readings import Reading
from scoremode.studies.rollouts.tables import mismatch_blocks, readings_blocks


def readings_section(readings: Sequence[Reading]) -> Markup:
    """What rollouts say about candidates; empty if there are no readings."""
    blocks = readings_blocks(readings)
    return fill("readings.html", writer=readings[0].writer, blocks=blocks) if blocks else Markup()


def render_mismatch(mismatch: Mismatch) -> str:
    title, *blocks = mismatch_blocks(mismatch)
    assert isinstance(title, Note), "the name of the result"
    about = [["mismatch", *mismatch.names, mismatch.texts_sha256]]
    return fill_page("mismatch.html", about=about, title=title.text, tokens=len(mismatch.rollout), blocks=blocks)


REFUSAL = ("a mismatch has a page of its own", "write several reports")
PAGE = ResultPage(lambda mismatches: render_mismatch(mismatches[0]), REFUSAL)
