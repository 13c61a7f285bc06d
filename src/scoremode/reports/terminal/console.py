"""Standard output as a console, and the two tables of every verb: facts, and blocks of numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from scoremode.errors import columns_of, escaped
from scoremode.reports.text import middle_cut

SHORTEST_NAME = 12  # names are cut to this width before a table is broken into two
GAP = 2  # spaces between two columns
BLANKS = re.compile(r" +(?=(?:\x1b\[0m)?\n)")  # with which tables fill their lines
WIDTH = 100  # columns where standard output is not a terminal and COLUMNS is not set


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


def listing(rows: Iterable[tuple[str, str]]) -> list[Any]:
    table = Facts()
    for name, text in rows:
        table.line(Text(name, "bold"), text)
    return [table]


class Fitted:
    """Something that is made when the width of the console is known."""

    def __init__(self, make: Callable[[int], RenderableType]) -> None:
        self._make = make

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._make(options.max_width)


class Facts:
    """Labels and values in two columns; a plain string is shown literally, never read as markup.

    A value with a word that is too long for its column stands below its label.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[Text, Text]] = []

    def line(self, label: str | Text, value: str | Text) -> None:
        self._rows.append((Text(label, "dim") if isinstance(label, str) else label, Text("") + value))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        indent = max(label.cell_len for label, _ in self._rows) + 3
        for label, value in self._rows:
            fits = longest_word(value.plain) <= options.max_width - indent
            left = indent if fits else min(GAP, options.max_width - 1)
            lines = value.wrap(console, options.max_width - left)
            first = label.copy()
            first.pad_right(indent - label.cell_len)
            if not fits and label:
                yield first
            for number, line in enumerate(lines):
                yield (first if fits and not number else Text(" " * left)) + line


def longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A title and one cell per row; a cell may have several lines."""

    title: str
    cells: Sequence[str]
    number: bool = True
    leaves: int = 0  # where there is no room, columns with the largest number are left out first; those with 0 stay

    @property
    def width(self) -> int:
        lines = (line for cell in (self.title, *self.cells) for line in cell.split("\n"))
        return max(map(cell_len, lines))


class BlockTable:
    """A table of named rows of numbers, with lines below each name.

    If it is too wide, it leaves out columns that may be left out and names them. If the others are still too wide, they
    are divided into blocks below each other.
    """

    def __init__(
        self,
        names: Sequence[str],
        columns: Sequence[TableColumn],
        below: Sequence[Sequence[str]] | None = None,
        *,
        title: str = "",
    ) -> None:
        self.names, self.columns, self.title = list(names), list(columns), title
        self.below = [list(lines) for lines in below] if below else [[] for _ in names]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(options.max_width, SHORTEST_NAME), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        limit = max(1, options.max_width - SHORTEST_NAME - GAP)  # of titles that are names
        columns = [_narrowed(one, limit) for one in self.columns]
        table = BlockTable(self.names, columns, self.below, title=self.title)
        for number, block in enumerate(table.blocks(options.max_width)):
            if number:
                yield ""
            yield block
        if left_out := [column.title for column in table.columns if column not in table.kept(options.max_width)]:
            words = f"left out at this width: {', '.join(left_out)}"
            yield Text(words, "dim")

    def kept(self, width: int) -> list[TableColumn]:
        """The columns that are shown at this width."""
        least, found = self.least_name_width(width), list(self.columns)
        while least + _widths(found) > width and (goes := max(found, key=lambda column: column.leaves)).leaves:
            found.remove(goes)
        return found

    def blocks(self, width: int) -> list[Table]:
        least = self.least_name_width(width)
        found: list[list[TableColumn]] = [[]]
        for column in self.kept(width):
            if found[-1] and least + _widths([*found[-1], column]) > width:
                found.append([])
            found[-1].append(column)
        room = min(width - _widths(block) for block in found)
        longest = max(cell_len(line) for lines in ([*self.names, self.title], *self.below) for line in lines)
        name_width = max(1, min(longest, max(room, least)))
        return [self._block(block, name_width) for block in found]

    def least_name_width(self, width: int) -> int:
        """The least width at which names that are cut still differ; at most what the widest column leaves.

        No word below a name is broken.
        """
        longest = max(map(cell_len, self.names))
        most = max(1, width - max(column.width + GAP for column in self.columns))
        different = len(set(self.names))
        unbroken = [self.title, *(line for lines in self.below for line in lines)]
        least = max(min(longest, SHORTEST_NAME), *map(longest_word, unbroken))
        while least < min(longest, most) and len({middle_cut(n, least, cell_len) for n in self.names}) < different:
            least += 1
        return min(least, most)

    def _block(self, columns: Sequence[TableColumn], name_width: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        shorter = [middle_cut(name, name_width, cell_len) for name in self.names]
        if len(set(shorter)) < len(set(self.names)):  # no width tells them apart: all of each name, on several lines
            shorter = self.names
        table.add_column(self.title, no_wrap=False, overflow="fold", min_width=name_width, max_width=name_width)
        for column in columns:
            side: Literal["left", "right"] = "right" if column.number else "left"
            table.add_column(column.title, justify=side, no_wrap=True, min_width=column.width)
        for i, name in enumerate(shorter):
            first = Text("\n").join([Text(name), *(Text(line, "dim") for line in self.below[i])])
            table.add_row(first, *(Text(column.cells[i]) for column in columns))
        return table


def _narrowed(column: TableColumn, limit: int) -> TableColumn:
    """The column with a title that is no wider than the limit."""
    return replace(column, title="\n".join(middle_cut(line, limit, cell_len) for line in column.title.split("\n")))


def _widths(columns: Sequence[TableColumn]) -> int:
    """The width of a block without its names."""
    return sum(column.width + GAP for column in columns)
