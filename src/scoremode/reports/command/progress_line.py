"""The progress line of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from scoremode.core.verbs.progress import ProgressState
from scoremode.reports.terminal import PlainConsole

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Task


class TerminalLine(ProgressState):
    """One line at the end of a terminal: the current phase and, once something is counted, how much is done."""

    def __init__(self, label: str, unit: str) -> None:
        self._bar = Bar(
            SpinnerColumn(),
            _Words(lambda: self.words),
            BarColumn(),
            _Words(self._count),
            _Words(lambda: self.details),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=PlainConsole(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        super().__init__(label, unit)

    def phase(self, words: str) -> None:
        super().phase(words)
        self._bar.reset(self._task, total=None)

    def changed(self) -> None:
        self._bar.update(self._task, completed=self.done, total=self.total)

    def _count(self) -> str:
        if self.total is None:
            return ""
        speed = self.speed
        return f"{self.done:,}/{self.total:,}" + (f" {speed:,.0f} {self.unit}/s" if speed is not None else "")

    def __enter__(self) -> TerminalLine:
        self._bar.start()
        self.shown.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.shown.remove(self)
        self._bar.stop()


class _Words(ProgressColumn):
    """A column of plain words, read again whenever the line is drawn. Brackets in names are not markup."""

    def __init__(self, words: Callable[[], str]) -> None:
        self._read = words
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(self._read())
