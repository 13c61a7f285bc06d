"""Standard output as a console, and tables of facts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class PlainConsole(Console):
    """A console that raises BrokenPipeError for the command line to handle, instead of ending the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Standard output; 100 columns wide if it is not a terminal, so that lines in files are not folded."""
    width = None if sys.stdout.isatty() else 100
    return PlainConsole(width=width, highlight=False, emoji=False, markup=False)


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
