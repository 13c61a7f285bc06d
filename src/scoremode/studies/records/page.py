"""The page of records: for each group its chart of KL against size and its table; each mark links to its record.

Names come from untrusted files, so the template escapes them. Links are relative, so the page works on any static host
that has the records at the same place beside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import quote

from scoremode.core.disk.uri import is_uri
from scoremode.core.statistics.comparison import BY_NAME
from scoremode.reports.html.size_chart import Charted, chart_of, legend
from scoremode.reports.html.templating import fill_page
from scoremode.reports.text import counted
from scoremode.studies.records.reading import CHANGED, Group, Record, distinct_names, group_notes, group_table, grouped

MOST_IN_BAR = 8  # groups that the bar at the top links to


def render(records: Sequence[Record], page: str) -> str:
    """The page as HTML; ``page`` is the file it will be written to."""
    listing = grouped(records)
    folder = "." if is_uri(page) else os.path.dirname(page) or "."
    sections = {f"group-{i}": f"Group {i}" for i in range(1, min(len(listing.groups), MOST_IN_BAR) + 1)}
    return fill_page(
        "records.html",
        about=[record.about for record in records],
        title=f"{counted(len(records), 'records')} of comparisons",
        sections={**sections, **({"changed": "Changed"} if listing.changed else {})},
        groups=[_shown(group, folder) for group in listing.groups],
        changed=[(record, _link(record, folder)) for record in listing.changed],
        why=CHANGED,
    )


def _shown(group: Group, folder: str) -> dict[str, object]:
    links, facts = [_link(record, folder) for record in group.records], [record.served for record in group.records]
    each = zip(distinct_names(group.records), group.records, links, strict=True)
    charted = [Charted(name, r.its.statistics, r.served, r.its.kl_missing or "no KL", link) for name, r, link in each]
    chart, missing = chart_of(BY_NAME["kl_mean"], charted)
    made_by, *others = group_notes(group)
    return {
        "title": group.title,
        "chart": chart,
        "missing": missing,
        "marks": legend(distinct_names(group.records), facts),
        "apart": group.apart,
        "blocks": [made_by, group_table(group, links), *others],
    }


def _link(record: Record, folder: str) -> str:
    """The way from the page's folder to the record. A colon is quoted, so that no name becomes a scheme."""
    return quote(os.fsencode(os.path.relpath(record.path, folder)))
