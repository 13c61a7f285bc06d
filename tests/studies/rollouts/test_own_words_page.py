"""The section of the page on texts that a model wrote: its tables, and names that are escaped."""

from __future__ import annotations

import re

import numpy as np

from scoremode.studies.rollouts.page import readings_section
from scoremode.studies.rollouts.parting import partings
from scoremode.studies.rollouts.readings import Reading

TEXTS, LENGTH = 12, 600
TEXT = np.repeat(np.arange(TEXTS), LENGTH)


def parted(at: int) -> Reading:
    """Every text has another choice at token ``at`` + its number."""
    place = np.tile(np.arange(1, LENGTH + 1), TEXTS)
    top = np.where(place == at + TEXT, 7, 5).astype(np.int32)
    found = partings(TEXT, TEXT, np.full(len(TEXT), 5, np.int32), top, np.where(top == 7, 0.5, 0.0), noise=0.02)
    return Reading("<b>writer</b>", f"q{at} & co", found, None)


def test_nothing_is_shown_of_other_texts() -> None:
    assert readings_section([]) == ""
    assert readings_section([Reading("a", "b", None, None)]) == ""


def test_partings_are_shown_and_names_are_escaped() -> None:
    page = readings_section([parted(100), parted(500)])
    assert "&lt;b&gt;writer&lt;/b&gt;" in page
    assert "q100 &amp; co" in page
    assert "<b>" not in page
    row = re.search(r"q100 &amp; co</th>(.*?)</tr>", page, re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
    assert (cells[0], cells[3], cells[4], cells[5]) == ("12", "105", "12", "0")
