"""Standard output as a console, and tables of facts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from scoremode.errors import escaped


class PlainConsole(Console):
    """A console for text that may come from anybody's file: its control characters are escaped, ours are not.

    It raises BrokenPipeError for the command line to handle, instead of ending the process.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escaped(text), style, control)


class _Styled:
    """Standard output of the command line, for colours: cli/streams.py escapes all other control characters."""

    def __init__(self, stream: Any) -> None:
        self.write = stream.write_styled
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console() -> Console:
    """Standard output; 100 columns wide if it is not a terminal, so that lines in files are not folded."""
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
