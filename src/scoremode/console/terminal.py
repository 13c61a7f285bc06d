"""Standard output as a console, tables, facts and notes on it, and the progress line.

Texts come from untrusted files: what a terminal would interpret is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Any, Literal, Self, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from scoremode.core.verbs.progress import ProgressBar
from scoremode.errors import columns_of, escaped
from scoremode.reports.table import Column, Facts, Note, Table
from scoremode.reports.text import NOT_MEASURED, shown

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
    """Standard output without blanks at line ends. Colours pass; streams.py escapes other controls."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._write = stream, getattr(stream, "write_styled", stream.write)

    def write(self, text: str) -> int:
        return int(self._write(BLANKS.sub("", text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console() -> Console:
    """A console on standard output, as wide as COLUMNS or the terminal says."""
    file: Any = _Styled(sys.stdout)
    return PlainConsole(file=file, width=columns_of(sys.stdout) or WIDTH, highlight=False, emoji=False, markup=False)


def renderable(block: Any) -> Any:
    """A block of a result as something that rich prints; what is one already stays."""
    match block:
        case Table():
            title = [Text(shown(block.title), "bold")] if block.title else []
            return Group(*title, *([TerminalTable(block)] if block.rows else []))
        case Facts():
            return facts_grid(block)
        case Note():
            return Text(shown(block.text), block.style)
        case str():
            return Text(block)
    return block


def facts_grid(facts: Facts) -> RichTable:
    """Facts in two columns; what is said about values is aligned, if the values are short."""
    beside = [cell_len(row.value) for row in facts.rows if row.about]
    wide = max((width for width in beside if width <= WIDEST), default=0)
    grid = RichTable.grid(padding=(0, 3, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for row in facts.rows:
        value = Text(shown(row.value), row.style)
        if row.about:
            value.pad_right(max(0, wide - value.cell_len))
            value = Text.assemble(value, (f"   {shown(row.about)}", "dim"))
        grid.add_row(Text(shown(row.label), "bold" if facts.bold else "dim", no_wrap=True), value)
    return grid


class TerminalTable:
    """A table of named rows. A name is never torn or cut, unless it is longer than the screen is wide.

    Errors stand beside their numbers if there is room, else below them. If it is still too wide, columns that may be
    left out are, and are named. If names leave no room even so, each has a line of its own above its numbers.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._rows = [i for i, row in enumerate(table.rows) if not row.page_only]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        rows, width = [self._table.rows[i] for i in self._rows], options.max_width
        names, below = [shown(row.name) for row in rows], [list(map(shown, row.below)) for row in rows]
        corner, columns = shown(self._table.corner), [column for column in self._table.columns if column.title]
        pieces = [word for lines in below for line in lines for word in line.split()]  # names of formats and engines
        least = max(map(_width, [corner, *pieces, *names]))
        visible, between = self._fitting(columns, width - least)
        if is_above := least + self._needed(visible, between) > width:
            least = max(map(_width, [corner, *pieces]))
            visible, between = self._fitting(columns, width - least)
        longest = max([least, *(_width(line) for lines in below for line in lines)])
        room = max(least, min(longest, width - self._needed(visible, between)))

        wide = {id(column): self._needed([column], between) - GAP for column in visible}

        def grid(which: Iterable[int], *, header: bool = True) -> RichTable:
            table = RichTable(box=None, pad_edge=False, header_style="bold", show_header=header)
            table.add_column(corner, overflow="fold", min_width=room, max_width=room)
            for column in visible:
                side: Literal["left", "right"] = "right" if column.number else "left"
                table.add_column(shown_lines(column.title), justify=side, no_wrap=True, min_width=wide[id(column)])
            for at in which:
                lines = [*([] if is_above else [Text(names[at])]), *(Text(line, "dim") for line in below[at])]
                cells = (Text(self._cell(column, self._rows[at], between)) for column in visible)
                table.add_row(Text("\n").join(lines), *cells)
            return table

        yield grid([] if is_above else range(len(names)))
        for at in range(len(names)) if is_above else ():
            yield Text(names[at], overflow="fold")
            yield grid([at], header=False)
        if left_out := [column for column in columns if column not in visible]:
            yield Text(_left_out(left_out, width), "dim")

    def _fitting(self, columns: Sequence[Column], width: int) -> tuple[list[Column], str]:
        """The columns that fit, as far as columns may be left out, and what is between a number and its error."""
        visible = list(columns)
        if self._needed(visible, " ") <= width:
            return visible, " "
        while visible and self._needed(visible, "\n") > width:
            goes = max(visible, key=lambda column: column.leaves)
            if not goes.leaves:
                break
            visible.remove(goes)
        return visible, "\n"

    def _needed(self, columns: Sequence[Column], between: str) -> int:
        """The width of columns without the names."""
        texts = ([column.title, *(self._cell(column, i, between) for i in self._rows)] for column in columns)
        return sum(GAP + max(map(_width, cells)) for cells in texts)

    @staticmethod
    def _cell(column: Column, row: int, between: str) -> str:
        if (cell := column.cells[row]) is None:
            return "-"
        text = cell.text.replace(" ", between) if cell.text == NOT_MEASURED else cell.text
        parts = [
            shown_lines(part, between * GAP if column.flows and between == " " else "\n")
            for part in (text, cell.error)
            if part
        ]
        return between.join(parts)


def _left_out(columns: Sequence[Column], width: int) -> str:
    """Says which columns were left out and how to see them; their titles are not torn either."""
    titles = ", ".join(column.title.replace("\n", " ").replace(" ", "\xa0") for column in columns)
    flag = [f"--columns {names}"] if (names := ",".join(column.name for column in columns if column.name)) else []
    line = f"left out at this width: {titles}; {', '.join([*flag, '--json'])} or a wider terminal shows them"
    return "\n".join(wrap(line, width, break_on_hyphens=False)).replace("\xa0", " ")


def shown_lines(text: str, end: str = "\n") -> str:
    return end.join(map(shown, text.split("\n")))


def _width(text: str) -> int:
    """The width of the longest line."""
    return max(map(cell_len, text.split("\n")))


class TerminalLine(ProgressBar):
    """One line at the end of a terminal."""

    def __init__(self, label: str, unit: str, stream: TextIO) -> None:
        self._stream, self._screen = stream, PlainConsole(stderr=True)
        super().__init__(label, unit, self._screen)

    def __enter__(self) -> Self:
        self._screen.file = self._stream
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._screen.file = None  # type: ignore[assignment]  # logs of libraries may write to it later: to sys.stderr
