"""Results in notebooks, which show the last value of a cell: the blocks of the terminal and the page, escaped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scoremode.core.statistics.comparison import Comparison, Comparisons
from scoremode.core.store.run import Run
from scoremode.reports.comparisons import comparison_notes, comparison_table
from scoremode.reports.html.page import result_pages
from scoremode.reports.html.templating import fill
from scoremode.reports.runs import run_facts
from scoremode.reports.table import Block


def notebook_html(value: Any) -> str | None:
    """A result as a table; None if it has none. ``ArrowTable`` asks for it."""
    if isinstance(value, Run):
        return _html([run_facts(value)])
    if isinstance(value, Comparison | Comparisons):
        found = [value] if isinstance(value, Comparison) else list(value)
        return _html([comparison_table(found), *comparison_notes(found)])
    shown = (page.blocks(value) for page in result_pages() if page.blocks is not None and isinstance(value, page.shows))
    return next(map(_html, shown), None)


def _html(blocks: Sequence[Block]) -> str:
    return str(fill("notebook.html", blocks=blocks))
