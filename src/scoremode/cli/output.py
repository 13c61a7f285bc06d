"""Results on standard output, as tables or as JSON, and a progress line on standard error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scoremode.cli.logs import is_quiet

if TYPE_CHECKING:
    from scoremode.verbs.progress import Progress


def show(parsed: argparse.Namespace, facts: Callable[[], Any], parts: Callable[[], list[Any]]) -> None:
    """Prints the facts as JSON if ``--json`` was given, else the parts as tables and text."""
    if parsed.json:
        print_json(facts())
    else:
        print_parts(parts())


def indented(value: Any) -> str:
    """A value as ``json.dumps(value, indent=1, …)`` writes it, ten times as fast: Python's own writer indents slowly.

    >>> indented({"a": [1, {"b": "é"}]}) == json.dumps({"a": [1, {"b": "é"}]}, indent=1, ensure_ascii=False)
    True
    """
    from msgspec.json import format as indent

    return indent(json.dumps(value, ensure_ascii=False, allow_nan=False), indent=1)


def print_json(value: Any) -> None:
    sys.stdout.write(indented(value) + "\n")


def print_json_list(values: Iterable[dict[str, Any]]) -> None:
    """Prints a list as ``print_json`` does, but holds only one of its objects in memory at a time."""
    opened = False
    for value in values:
        sys.stdout.write(",\n " if opened else "[\n ")
        sys.stdout.write(indented(value).replace("\n", "\n "))
        opened = True
    sys.stdout.write("\n]\n" if opened else "[]\n")


def print_parts(parts: Iterable[Any]) -> None:
    from scoremode.report.terminal.console import console

    out = console()
    for part in parts:
        out.print(part)


@contextmanager
def progress_bar(label: str, unit: str = "tokens") -> Iterator[Progress | None]:
    """Yields a callback that shows progress, or None if standard error is not a terminal or --quiet was given."""
    if sys.stderr is None or not sys.stderr.isatty() or is_quiet():
        yield None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    from scoremode.report.terminal.console import PlainConsole

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=PlainConsole(stderr=True), transient=True) as bar:
        yield _Line(bar, label, unit)


class _Line:
    """The progress line: the current phase and, if known, how much of it is done."""

    def __init__(self, bar: Any, label: str, unit: str) -> None:
        self._bar, self._unit = bar, unit
        self._task = bar.add_task(label, total=None, speed="", detail="")
        self._began: tuple[float, int] | None = None

    def phase(self, words: str) -> None:
        """Begins another phase, named by ``words``: progress and speed start anew."""
        self._began = None
        self._bar.reset(self._task, total=None, description=words, speed="", detail="")

    def label(self, words: str) -> None:
        """Renames the current phase; its progress, speed and time stay."""
        self._bar.update(self._task, description=words)

    def detail(self, words: str) -> None:
        """Shows details of the current phase, such as what each of several engines does."""
        self._bar.update(self._task, detail=words)

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began = now, done
        seconds, fed = now - self._began[0], done - self._began[1]
        speed = f"{fed / seconds:,.0f} {self._unit}/s" if seconds > 0 and fed else ""
        self._bar.update(self._task, completed=done, total=total, speed=speed)
