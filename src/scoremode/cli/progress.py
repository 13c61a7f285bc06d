"""A progress line on standard error, if that is a terminal: the current phase, tokens per second, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scoremode.cli.logs import is_quiet
from scoremode.verbs.progress import Progress


@contextmanager
def progress_bar(label: str, unit: str = "tokens") -> Iterator[Progress | None]:
    """A callback for the verbs, or None if standard error is not a terminal or --quiet was given."""
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
    """One line: the phase, and how much of it is done if that is known."""

    def __init__(self, bar: Any, label: str, unit: str) -> None:
        self._bar, self._unit = bar, unit
        self._task = bar.add_task(label, total=None, speed="", detail="")
        self._began: tuple[float, int] | None = None

    def phase(self, words: str) -> None:
        """Something else is being waited for now."""
        self._began = None
        self._bar.reset(self._task, total=None, description=words, speed="", detail="")

    def label(self, words: str) -> None:
        """Other words for what is under way: what is done, the speed and the time stay."""
        self._bar.update(self._task, description=words)

    def detail(self, words: str) -> None:
        """More about the same: what each of several engines does."""
        self._bar.update(self._task, detail=words)

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began = now, done
        seconds, fed = now - self._began[0], done - self._began[1]
        speed = f"{fed / seconds:,.0f} {self._unit}/s" if seconds > 0 and fed else ""
        self._bar.update(self._task, completed=done, total=total, speed=speed)
