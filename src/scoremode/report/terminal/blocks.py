"""A table that never cuts a number: if a screen is too narrow for it, it goes on below, and names get shorter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from scoremode.report.text import middle_cut

SHORTEST_NAME = 12  # names are cut to this width before a table is broken into two
GAP = 2  # spaces between two columns


@dataclass(frozen=True, slots=True)
class Column:
    """A title and one cell per row; a cell may have several lines."""

    title: str
    cells: Sequence[str]
    number: bool = True

    @property
    def width(self) -> int:
        lines = (line for cell in (self.title, *self.cells) for line in cell.split("\n"))
        return max(map(cell_len, lines))


class BlockTable:
    """Rows of numbers with a name each. Blocks of columns stand below each other, as many as the width asks for."""

    def __init__(self, names: Sequence[str], columns: Sequence[Column]) -> None:
        self.names, self.columns = list(names), list(columns)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(options.max_width, SHORTEST_NAME), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for number, block in enumerate(self.blocks(options.max_width)):
            if number:
                yield ""
            yield block

    def blocks(self, width: int) -> list[Table]:
        least = self.least_name_width(width)
        found: list[list[Column]] = [[]]
        for column in self.columns:
            if found[-1] and least + _widths([*found[-1], column]) > width:
                found.append([])
            found[-1].append(column)
        room = min(width - _widths(block) for block in found)
        name_width = max(1, min(max(map(cell_len, self.names)), max(room, least)))
        return [self._block(block, name_width) for block in found]

    def least_name_width(self, width: int) -> int:
        """How wide names must be, so that those that differ still do; at most what the widest column leaves."""
        longest = max(map(cell_len, self.names))
        most = max(1, width - max(column.width + GAP for column in self.columns))
        different = len(set(self.names))
        least = min(longest, SHORTEST_NAME)
        while least < min(longest, most) and len({middle_cut(n, least, cell_len) for n in self.names}) < different:
            least += 1
        return min(least, most)

    def _block(self, columns: Sequence[Column], name_width: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        shorter = [middle_cut(name, name_width, cell_len) for name in self.names]
        if len(set(shorter)) < len(set(self.names)):  # no width tells them apart: all of each name, on several lines
            shorter = self.names
        table.add_column("", no_wrap=False, overflow="fold", min_width=name_width, max_width=name_width)
        for column in columns:
            side: Literal["left", "right"] = "right" if column.number else "left"
            table.add_column(column.title, justify=side, no_wrap=True, min_width=column.width)
        for i, name in enumerate(shorter):
            table.add_row(Text(name), *(Text(column.cells[i]) for column in columns))
        return table


def _widths(columns: Sequence[Column]) -> int:
    """The width of a block without its names."""
    return sum(column.width + GAP for column in columns)
