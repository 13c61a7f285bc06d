"""Puts records together that are comparable by proof, says why others are apart, and shows them.

Two records are comparable if they have the same plan (so the same ids of the same text), the same baseline by its
fingerprint, served with the same settings, and the same vocabulary. Nothing is ordered across groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scoremode.core.statistics.comparison import BY_NAME
from scoremode.reports.comparisons import size_and_bits
from scoremode.reports.numbers import shown_statistic
from scoremode.reports.records.reading import OF_BASELINE, OWN, Record
from scoremode.reports.table import NOTHING, Block, Cell, Column, Note, Row, Table, words
from scoremode.reports.text import counted
from scoremode.values import usable

SHOWN = ("kl_mean", "ppl_ratio", "same_top")
COPIES = "copies of records above, counted once"
CHANGED = "changed after they were written: their seals do not fit, so they are neither compared nor drawn"


@dataclass(frozen=True, slots=True)
class Group:
    """Records that are comparable with each other, the smallest KL first."""

    records: Sequence[Record]
    apart: str = ""  # why they are not in an earlier group

    @property
    def title(self) -> str:
        first = self.records[0]
        return f"{first.baseline} ({first.baseline_by}) on {first.text}, {first.method}"


@dataclass(frozen=True, slots=True)
class Grouped:
    groups: Sequence[Group]
    changed: Sequence[Record]  # by hand
    copies: Sequence[Record]  # of records that are in the groups


def grouped(records: Sequence[Record]) -> Grouped:
    """Groups records by what must agree; our own come first, and of those the group with the most records."""
    together: dict[frozenset[tuple[str, str]], list[Record]] = {}
    honest = [one for one in records if not one.changed]
    distinct = {one.seal: one for one in reversed(honest)}  # the first of each
    for one in (one for one in honest if distinct[one.seal] is one):
        together.setdefault(frozenset(one.must_agree.items()), []).append(one)
    ordered = sorted(together.values(), key=lambda members: (members[0].must_agree["tool"] != OWN, -len(members)))
    groups = list[Group]()
    for members in ordered:
        members.sort(key=_by_kl)
        groups.append(Group(members, _why_apart(members[0], [group.records[0] for group in groups])))
    copies = [one for one in honest if distinct[one.seal] is not one]
    return Grouped(groups, [one for one in records if one.changed], copies)


def _by_kl(record: Record) -> tuple[bool, float]:
    kl = usable(record.statistics.get("kl_mean"))
    return kl is None, kl or 0.0


def _why_apart(record: Record, earlier: Sequence[Record]) -> str:
    """In what a record differs from the earlier group that it has most in common with; '' for the first group."""
    mine = record.must_agree
    found = [
        (number, [what for what in {**other.must_agree, **mine} if mine.get(what) != other.must_agree.get(what)])
        for number, other in enumerate(earlier, start=1)
    ]
    if not found:
        return ""
    number, differs = min(found, key=lambda pair: len(pair[1]))
    if "tool" in differs:
        differs = ["tool"]  # which measures in another way, whatever else is equal
    elif "text" in differs:  # a plan holds the ids of its text
        differs = [what for what in differs if what != "plan"]
    if (engine := f"{OF_BASELINE}engine") in differs:  # another engine has other settings
        differs = [what for what in differs if what == engine or not what.startswith(OF_BASELINE)]
    other = earlier[number - 1].must_agree
    said = [
        f"{what} ({mine.get(what, 'none')}, not {other.get(what, 'none')})" if what.startswith(OF_BASELINE) else what
        for what in differs
    ]
    return f"not comparable with group {number}: another {', another '.join(said)}"


def distinct_names(records: Sequence[Record]) -> list[str]:
    """The names of records, with the file where two have one name."""
    names = [one.name for one in records]
    return [f"{one.name} ({one.file})" if names.count(one.name) > 1 else one.name for one in records]


def group_table(group: Group, links: Sequence[str] = ()) -> Table:
    """The records of a group, one row each; ``links`` lead to their files."""
    rows = []
    for i, (one, name) in enumerate(zip(group.records, distinct_names(group.records), strict=True)):
        link, known = links[i] if links else "", {name: value for name, value in one.details.items() if value}
        about = (one.served.line or "how it was served", {**known, "measured by": one.by})
        rows.append(Row(name, link=link, details=about))
    columns = [
        words("format", [one.served.line or NOTHING for one in group.records], page="", leaves=1),
        Column("bits", [size_and_bits(one.served) for one in group.records], page="Bits/weight, size"),
    ]
    for name in SHOWN:
        statistic = BY_NAME[name]
        cells = [Cell(*shown_statistic(statistic, one.statistics)) for one in group.records]
        if any(usable(one.statistics.get(name)) is not None for one in group.records):
            title = statistic.column.title if statistic.column else statistic.label
            columns.append(Column(title, cells, page=statistic.label, about=statistic.about))
    columns.append(words("record", [one.file for one in group.records], page="", leaves=2))
    return Table(rows, columns)


def group_notes(group: Group) -> list[Note]:
    """What to know of a group: by what it was measured, on how much, and what that does not see."""
    first = group.records[0]
    targets = sorted({int(usable(one.statistics.get("targets")) or 0) for one in group.records})
    said = [f"{counted(len(group.records), 'records')} by {', '.join(sorted({one.by for one in group.records}))}"]
    if targets != [0]:
        said[0] += f", {' or '.join(f'{count:,}' for count in targets)} targets"
    versions = {
        name: {dict(one.baseline_versions).get(name) for one in group.records} for name, _ in first.baseline_versions
    }
    differ = [f"{name} {', '.join(sorted(map(str, its)))}" for name, its in versions.items() if len(its) > 1]
    said += [f"the baseline was served with different versions or devices: {'; '.join(differ)}"] if differ else []
    return [Note(line) for line in (*said, first.limits) if line]


def blocks(found: Grouped) -> list[Block]:
    """The groups for a terminal."""
    shown = list[Block]()
    for number, group in enumerate(found.groups, start=1):
        shown += [*([""] if shown else []), Note(f"group {number}: {group.title}", "bold"), group_table(group)]
        shown += [Note(group.apart, "yellow")] if group.apart else []
        shown += [Note(note.text, "dim") for note in group_notes(group)]
    if found.copies:
        shown += [Note(f"{', '.join(one.file for one in found.copies)}: {COPIES}", "dim")]
    if found.changed:
        named = ", ".join(f"{one.file} ({one.name})" for one in found.changed)
        shown += ["", Note(f"{named}: {CHANGED}", "red")]
    return shown


def facts(found: Grouped) -> dict[str, Any]:
    """The groups for machines."""
    return {
        "groups": [
            {
                "baseline": group.records[0].baseline,
                "corpus": group.records[0].text,
                "apart": group.apart or None,
                "must_agree": dict(group.records[0].must_agree),
                "records": [
                    {"file": one.file, "name": one.name, "by": one.by, "statistics": dict(one.statistics)}
                    for one in group.records
                ],
            }
            for group in found.groups
        ],
        "changed": [one.file for one in found.changed],
        "copies": [one.file for one in found.copies],
    }
