"""Standard output as a console, and the two tables of every verb: facts, and blocks of numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from scoremode.errors import escaped
from scoremode.report.text import middle_cut

SHORTEST_NAME = 12  # names are cut to this width before a table is broken into two
GAP = 2  # spaces between two columns


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
    """Standard output that lets colours through: cli/streams.py escapes all other control characters."""

    def __init__(self, stream: Any) -> None:
        self.write = stream.write_styled
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console() -> Console:
    """A console on standard output; 100 columns wide if it is not a terminal, so that lines in files are not folded."""
    width = None if sys.stdout.isatty() else 100
    file: Any = _Styled(sys.stdout) if hasattr(sys.stdout, "write_styled") else None
    return PlainConsole(file=file, width=width, highlight=False, emoji=False, markup=False)


def listing(rows: Iterable[tuple[str, str]]) -> list[Any]:
    table = Facts()
    for name, text in rows:
        table.line(Text(name, "bold"), text)
    return [table]


class Facts(Table):
    """Labels and values in two columns; a plain string is shown literally, never read as markup."""

    def __init__(self) -> None:
        super().__init__(box=None, show_header=False, padding=(0, 3, 0, 0))
        self.add_column(style="dim", no_wrap=True)
        self.add_column(overflow="fold")

    def line(self, label: str | Text, value: str | Text) -> None:
        self.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in (label, value)))


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
        self, names: Sequence[str], columns: Sequence[TableColumn], below: Sequence[Sequence[str]] | None = None
    ) -> None:
        self.names, self.columns = list(names), list(columns)
        self.below = [list(lines) for lines in below] if below else [[] for _ in names]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(options.max_width, SHORTEST_NAME), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for number, block in enumerate(self.blocks(options.max_width)):
            if number:
                yield ""
            yield block
        if left_out := [column.title for column in self.columns if column not in self.kept(options.max_width)]:
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
        longest = max(cell_len(line) for lines in (self.names, *self.below) for line in lines)
        name_width = max(1, min(longest, max(room, least)))
        return [self._block(block, name_width) for block in found]

    def least_name_width(self, width: int) -> int:
        """The least width at which names that are cut still differ; at most what the widest column leaves."""
        longest = max(map(cell_len, self.names))
        most = max(1, width - max(column.width + GAP for column in self.columns))
        different = len(set(self.names))
        least = min(longest, SHORTEST_NAME)
        while least < min(longest, most) and len({middle_cut(n, least, cell_len) for n in self.names}) < different:
            least += 1
        return min(least, most)

    def _block(self, columns: Sequence[TableColumn], name_width: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        shorter = [middle_cut(name, name_width, cell_len) for name in self.names]
        if len(set(shorter)) < len(set(self.names)):  # no width tells them apart: all of each name, on several lines
            shorter = self.names
        table.add_column("", no_wrap=False, overflow="fold", min_width=name_width, max_width=name_width)
        for column in columns:
            side: Literal["left", "right"] = "right" if column.number else "left"
            table.add_column(column.title, justify=side, no_wrap=True, min_width=column.width)
        for i, name in enumerate(shorter):
            first = Text("\n").join([Text(name), *(Text(line, "dim") for line in self.below[i])])
            table.add_row(first, *(Text(column.cells[i]) for column in columns))
        return table


def _widths(columns: Sequence[TableColumn]) -> int:
    """The width of a block without its names."""
    return sum(column.width + GAP for column in columns)
