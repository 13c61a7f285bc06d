"""Standard output as a console, and tables, facts and notes on it.

Texts come from untrusted files: what a terminal would interpret is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from scoremode.errors import columns_of, escaped
from scoremode.reports.table import Cell, Column, Facts, Note, Table
from scoremode.reports.text import NOT_MEASURED, middle_cut, shown, start_cut

SHORTEST_NAME = 12  # names are cut to this width before a table is broken into two
GAP = 2  # spaces between two columns
BLANKS = re.compile(r" +(?=(?:\x1b\[0m)?\n)")  # with which tables fill their lines
WIDTH = 100  # columns where standard output is not a terminal and COLUMNS is not set
WIDEST = 28  # characters; longer values of facts do not move what is said about the others


class PlainConsole(Console):
    """A console for untrusted text: control characters in the text are escaped, those of the console itself are not.

    It raises BrokenPipeError for the command line to handle, instead of ending the process.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escaped(text), style, control)


class _Styled:
    """Standard output without blanks at line ends. Colours pass; command/streams.py escapes other controls."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._write = stream, getattr(stream, "write_styled", stream.write)

    def write(self, text: str) -> int:
        return int(self._write(BLANKS.sub("", text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console() -> Console:
    """A console on standard output, as wide as COLUMNS or the terminal says."""
    file: Any = _Styled(sys.stdout)
    return PlainConsole(file=file, width=output_width(), highlight=False, emoji=False, markup=False)


def output_width() -> int:
    return columns_of(sys.stdout) or WIDTH


def renderable(block: Any) -> Any:
    """A block of a result as something that rich prints; what is one already stays."""
    match block:
        case Table():
            title = [Text(shown(block.title), "bold")] if block.title else []
            return Group(*title, *([TerminalTable(block)] if block.rows else []))
        case Facts():
            return TerminalFacts(block)
        case Note():
            return Text(shown(block.text), block.style)
        case str():
            return Text(block)
    return block


class TerminalFacts:
    """Facts in two columns. A value with a word that is too long for its column stands below its label."""

    def __init__(self, facts: Facts) -> None:
        beside = [cell_len(row.value) for row in facts.rows if row.about]
        wide = max((width for width in beside if width <= WIDEST), default=0)
        self._rows = []
        for row in facts.rows:
            value = Text(shown(row.value), row.style)
            if row.about:
                value.pad_right(max(0, wide - value.cell_len))
                value = Text.assemble(value, (f"   {shown(row.about)}", "dim"))
            self._rows.append((Text(shown(row.label), "bold" if facts.bold else "dim"), value))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        indent = max(label.cell_len for label, _ in self._rows) + 3
        for label, value in self._rows:
            fits = longest_word(value.plain) <= options.max_width - indent
            left = indent if fits else min(GAP, options.max_width - 1)
            first = label.copy()
            first.pad_right(indent - label.cell_len)
            if not fits and label:
                yield first
            for at, line in enumerate(value.wrap(console, options.max_width - left)):
                yield (first if fits and not at else Text(" " * left)) + line


def longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


@dataclass(frozen=True, slots=True)
class _Printed:
    """A column as it is printed: its title and its cells may have several lines."""

    title: str
    cells: Sequence[str]
    number: bool
    leaves: int

    @property
    def width(self) -> int:
        lines = (line for cell in (self.title, *self.cells) for line in cell.split("\n"))
        return max(map(cell_len, lines))


class TerminalTable:
    """A table of named rows.

    Errors stand beside their numbers if there is room, else below them. If it is still too wide, it leaves out columns
    that may be left out and names them, and divides the others into blocks below each other.
    """

    def __init__(self, table: Table) -> None:
        self._rows = [i for i, row in enumerate(table.rows) if not row.page_only]
        rows = [table.rows[i] for i in self._rows]
        self._names, self._corner = [shown(row.name) for row in rows], shown(table.corner)
        self._below = [list(map(shown, row.below)) for row in rows]
        self._columns = [column for column in table.columns if column.title]
        self._cut, self._may_be_alike = (middle_cut, False) if table.cut == "middle" else (start_cut, True)
        lines = [*self._names, self._corner, *(line for lines in self._below for line in lines)]
        self._longest = max(map(cell_len, lines))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        columns = [self._printed(column, " ", width) for column in self._columns]
        if self._longest + _widths(columns) > width:
            columns = [self._printed(column, "\n", width) for column in self._columns]
        least, kept = self._least_name_width(columns, width), list(columns)
        while least + _widths(kept) > width and (goes := max(kept, key=lambda column: column.leaves)).leaves:
            kept.remove(goes)
        blocks: list[list[_Printed]] = [[]]
        for column in kept:
            if blocks[-1] and least + _widths([*blocks[-1], column]) > width:
                blocks.append([])
            blocks[-1].append(column)
        room = min(width - _widths(block) for block in blocks)
        for at, block in enumerate(blocks):
            if at:
                yield ""
            yield self._block(block, max(1, min(self._longest, max(room, least))))
        if left_out := [column.title.replace("\n", " ") for column in columns if column not in kept]:
            yield Text(f"left out at this width: {', '.join(left_out)}", "dim")

    def _printed(self, column: Column, between: str, width: int) -> _Printed:
        """The column with a title that is no wider than what names leave."""
        limit = max(1, width - SHORTEST_NAME - GAP)
        title = "\n".join(middle_cut(shown(line), limit, cell_len) for line in column.title.split("\n"))
        cells = [self._cell(column.cells[i], "\n" if column.flows else between) for i in self._rows]
        if column.flows:
            others = [self._printed(other, between, width) for other in self._columns if other is not column]
            room = width - min(self._longest, max(SHORTEST_NAME, width // 3)) - _widths(others) - GAP
            cells = [filled(cell.split("\n"), room) for cell in cells]
        return _Printed(title, cells, column.number, column.leaves)

    @staticmethod
    def _cell(cell: Cell | None, between: str) -> str:
        if cell is None:
            return "-"
        text = cell.text.replace(" ", between) if cell.text == NOT_MEASURED else cell.text
        return between.join(shown(part) for part in (*text.split("\n"), cell.error) if part)

    def _least_name_width(self, columns: Sequence[_Printed], width: int) -> int:
        """The least width at which names that are cut still differ; at most what the widest column leaves.

        No word below a name is broken.
        """
        longest = max(map(cell_len, self._names))
        most = max(1, width - max(column.width + GAP for column in columns))
        unbroken = [self._corner, *(line for lines in self._below for line in lines)]
        least = max(min(longest, SHORTEST_NAME), *map(longest_word, unbroken))
        while not self._may_be_alike and least < min(longest, most) and not self._differ(least):
            least += 1
        return min(least, most)

    def _differ(self, width: int) -> bool:
        return len({self._cut(name, width, cell_len) for name in self._names}) == len(set(self._names))

    def _block(self, columns: Sequence[_Printed], name_width: int) -> RichTable:
        table = RichTable(box=None, pad_edge=False, header_style="bold")
        names = [self._cut(name, name_width, cell_len) for name in self._names]
        if not self._may_be_alike and not self._differ(name_width):  # all of each name, on several lines
            names = self._names
        table.add_column(self._corner, no_wrap=False, overflow="fold", min_width=name_width, max_width=name_width)
        for column in columns:
            side: Literal["left", "right"] = "right" if column.number else "left"
            table.add_column(column.title, justify=side, no_wrap=True, min_width=column.width)
        for i, name in enumerate(names):
            first = Text("\n").join([Text(name), *(Text(line, "dim") for line in self._below[i])])
            table.add_row(first, *(Text(column.cells[i]) for column in columns))
        return table


def filled(words: Sequence[str], width: int) -> str:
    """Joins words that may contain spaces into lines of at most this width.

    >>> filled(["' a' -1.2", "'b' -3.4", "'c' -5.6"], 20)
    "' a' -1.2  'b' -3.4\\n'c' -5.6"
    """
    lines = list[str]()
    for word in words:
        if lines and cell_len(lines[-1]) + GAP + cell_len(word) <= width:
            lines[-1] += " " * GAP + word
        else:
            lines.append(word)
    return "\n".join(lines)


def _widths(columns: Sequence[_Printed]) -> int:
    """The width of a block without its names."""
    return sum(column.width + GAP for column in columns)
