"""The HTML page of a trainer against rollouts: the main numbers, by position, and by slice. It needs no script."""

from __future__ import annotations

from scoremode.reports.html.page import ResultPage
from scoremode.reports.html.templating import fill_page
from scoremode.studies.rollouts.mismatch_statistics import Mismatch
from scoremode.studies.rollouts.tables import mismatch_facts


def render_mismatch(found: Mismatch) -> str:
    """Renders the page of a mismatch."""
    s = found.statistics()
    by_position = [(f"{row['first']:,} to {row['last']:,}", row) for row in found.by_position()]
    return fill_page(
        "mismatch.html",
        title=f"{s['name']} against the rollouts of {s['rollout']}",
        s=s,
        facts=dict(mismatch_facts(s)),
        tables=[
            ("position", "By position in the text", "Tokens of the text", by_position if len(by_position) > 1 else []),
            ("slice", "By slice", "Slice", [(row["slice"], row) for row in found.by_slice()]),
        ],
        left_out=[name for name, rows in (("position", by_position[1:]), ("slice", found.by_slice())) if not rows],
        has_kl=found.kl is not None,
    )


REFUSAL = ("a mismatch has a page of its own", "write several reports")
PAGE = ResultPage(Mismatch, lambda found: render_mismatch(found[0]), REFUSAL)
