"""What a result shows, as values: tables, facts and notes. They are made once, and each output shows all of them.

terminal   ``renderable`` in terminal.py
page       the macro ``show`` in html/templates/blocks.html; notebooks have it, too
card       ``markdown_table`` in model_card.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scoremode.values import Estimate, rounded, usable

NOTHING = "–"
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """A number or a few words, and beside or below it in small print its error."""

    text: str
    error: str = ""

    @property
    def words(self) -> str:
        return f"{self.text} {self.error}".rstrip()


def number(value: Any, stderr: Any = None, *, percent: bool = False, sign: str = "") -> Cell:
    """A number by the one rule for digits, see ``rounded``; ``sign`` stands before numbers above 0."""
    text, error = rounded(value, stderr, percent=percent)
    return Cell(f"{sign if (usable(value) or 0) > 0 else ''}{text}", error)


def estimate(figure: Estimate | None, *, percent: bool = False) -> Cell:
    return Cell(NOTHING) if figure is None or not figure.n else number(figure.value, figure.stderr, percent=percent)


def count(value: int | None) -> Cell:
    return Cell(NOTHING if value is None else f"{value:,}")


@dataclass(frozen=True, slots=True)
class Column:
    """A column; an output for which it has no title does not show it."""

    title: str  # in a terminal
    cells: Sequence[Cell | None]  # None: the column does not apply to the row
    page: str | None = None  # the title on the page, if it is not that of the terminal with a capital
    card: str = ""  # the title on a model card
    about: str = ""  # what it is, in a line
    number: bool = True
    leaves: int = 0  # in a narrow terminal, columns with the largest number are left out first; those with 0 stay
    name: str = ""  # by which --columns asks for it
    flows: bool = False  # do the lines of a cell stand beside each other if there is room?

    @property
    def label(self) -> str:
        return capital(self.title) if self.page is None else self.page


def counts(title: str, rows: Sequence[Fields], name: str, **how: Any) -> Column:
    """A column of whole numbers, which are fields of results."""
    return Column(title, [count(row[name]) for row in rows], **how)


def numbers(
    title: str, rows: Sequence[Fields], name: str, *, percent: bool = False, sign: str = "", **how: Any
) -> Column:
    """A column of numbers with errors, which are fields ``name`` and ``name_stderr`` of results."""
    cells = [number(row[name], row.get(f"{name}_stderr"), percent=percent, sign=sign) for row in rows]
    return Column(title, cells, **how)


def words(title: str, cells: Sequence[str], **how: Any) -> Column:
    return Column(title, [Cell(text) for text in cells], number=False, **how)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    tag: str = ""  # what it is, beside its name
    below: Sequence[str] = ()  # in a terminal: lines below the name
    page_only: bool = False
    strong: bool = False
    # on the page: its group, the colour of its charts, and behind a click a line and facts about it
    group: str = ""
    series: int | None = None
    details: tuple[str, Mapping[str, str]] | None = None
    is_reference: bool = False
    link: str = ""  # on the page: where a click on its name leads


@dataclass(frozen=True, slots=True)
class Table:
    rows: Sequence[Row]
    columns: Sequence[Column]
    title: str = ""
    corner: str = ""  # the title of the names

    def groups(self) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(self.rows):
            groups.setdefault(row.group, []).append(i)
        return groups


@dataclass(frozen=True, slots=True)
class Fact:
    label: str
    value: str
    about: str = ""
    style: str = ""  # of the value in a terminal


@dataclass(slots=True)
class Facts:
    """Labels and values in two columns."""

    rows: list[Fact] = field(default_factory=list)
    bold: bool = False  # are the labels names?

    def line(self, label: str, value: str, about: str = "", style: str = "") -> None:
        self.rows.append(Fact(label, value, about, style))


@dataclass(frozen=True, slots=True)
class Note:
    """A line below a table. Its style is a colour of the terminal."""

    text: str
    style: str = ""


Block = Table | Facts | Note | str
"""A part of what a result shows; '' is an empty line."""


def capital(text: str) -> str:
    """Begins a sentence with a capital, unless it begins with a name, which stays as it is.

    >>> capital("noise floor: 0"), capital("q4-model: a note"), capital("base: a note")
    ('Noise floor: 0', 'q4-model: a note', 'base: a note')
    """
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,]", text) else text
