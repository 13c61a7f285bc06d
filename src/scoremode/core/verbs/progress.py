"""Progress: how much is done, how fast, and what is being waited for; and a bar of it in notebooks."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, ParamSpec, Protocol, Self, TypeVar, runtime_checkable

from scoremode.errors import LOGGER, one_line

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class Progress(Protocol):
    """A function that every verb calls while it works, with the tokens that are done and the tokens in all.

    It may have more methods, which get words: ``phase`` what is being waited for before the first token, ``label``
    another name of what is under way, ``detail`` what each replica does, and ``say`` a line that a user should see.

    >>> import scoremode as sm
    >>> def told(done, total):
    ...     print(done, "of", total)
    >>> run = sm.ppl("table:uniform", text="any text", fresh=True, progress=told)
    0 of 8
    8 of 8
    """

    def __call__(self, done: int, total: int, /) -> None: ...


def announce(progress: Progress | None, words: str, method: str = "phase") -> None:
    """Shows what is being waited for now, as in "loading org/model with transformers", if the progress can."""
    tell = getattr(progress, method, None)
    if tell is not None:
        tell(words)


def tell_display(words: str, method: str = "phase") -> None:
    """Shows words on the newest display, if there is one: for work that is handed no progress."""
    announce(ProgressState.shown[-1] if ProgressState.shown else None, words, method)


def part_of(progress: Progress | None, before: int, total: int) -> Progress | None:
    """A callback that reports the progress of one part as that of the whole; ``before`` was done before the part."""
    return None if progress is None else lambda done, _: progress(before + done, total)


class ProgressState:
    """A Progress that remembers what it was told, in words and numbers: the base of all that show it."""

    shown: ClassVar[list[ProgressState]] = []  # those on a screen now, the newest last

    def __init__(self, label: str = "scoring", unit: str = "tokens") -> None:
        """``label`` names the work while units are counted, if nothing else names it."""
        self._label, self.unit = label, unit
        self._imported_before = set(_being_imported())
        self.phase("starting")

    def phase(self, words: str) -> None:
        """Begins another phase, named by ``words``: progress and speed start anew."""
        self._words, self._is_phase, self.details = words, True, ""
        self._phase_began = self._counting_began = self._counted_at = time.monotonic()
        self.done, self.first, self.total = 0, 0, None
        self.changed()

    def label(self, words: str) -> None:
        """Renames the current phase; its progress, speed and time stay."""
        self._words, self._is_phase = words, False
        self.changed()

    def detail(self, words: str) -> None:
        """Adds details of the current phase, such as what each of several engines does."""
        self.details = words
        self.changed()

    def __call__(self, done: int, total: int, /) -> None:
        if self.total is None:
            self._counting_began, self.first = time.monotonic(), done
            if self._is_phase:
                self._words = self._label
        self.done, self.total, self._counted_at = done, total, time.monotonic()
        self.changed()

    total: int | None

    def changed(self) -> None:
        """Is called after every change; displays that do not look by themselves override it."""

    @property
    def words(self) -> str:
        """What is under way. Before anything is counted, a library that is being imported is named instead."""
        if self.total is None:
            for name in _being_imported():
                if name not in self._imported_before:
                    return f"importing {name}"
        return self._words

    @property
    def speed(self) -> float | None:
        """Units per second in this phase; None if it is not known yet."""
        seconds, fed = self._counted_at - self._counting_began, self.done - self.first
        return fed / seconds if self.total is not None and seconds > 0 and fed > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """The time that the rest will take at this speed, less the time since the last count; None: not known yet."""
        speed = self.speed
        if speed is None or self.total is None:
            return None
        return max(0.0, (self.total - self.done) / speed - (time.monotonic() - self._counted_at))

    def counts(self) -> str:
        """How much is done, how fast, and how long the rest will take, in words; '' if nothing is counted yet."""
        if self.total is None:
            return ""
        said = [f"{self.done:,} of {self.total:,} {self.unit}"]
        speed, left = self.speed, self.seconds_left
        if speed is not None:
            said.append(f"{speed:,.0f} {self.unit}/s" if speed >= 10 else f"{speed:.2g} {self.unit}/s")
        if left is not None:
            said.append(f"about {duration(left)} left")
        return ", ".join(said)

    def line(self) -> str:
        counts = self.counts() or f"for {duration(time.monotonic() - self._phase_began)}"
        return ", ".join(part for part in (self.words, counts, self.details) if part)


def duration(seconds: float) -> str:
    """A time in words, with one or two units.

    >>> duration(12.3), duration(250), duration(7500), duration(200_000)
    ('12 s', '4 min', '2 h 5 min', '2 d 7 h')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    days, hours = divmod(minutes // 60, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min"


def _being_imported() -> Iterator[str]:
    """Yields packages whose import has begun and not ended, the outermost first, without Python's own."""
    for name in [name for name in list(sys.modules) if "." not in name and name not in sys.stdlib_module_names]:
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            yield name


# ── displays ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class ProgressBar(ProgressState):
    """A bar of rich with a line beside it: the current phase and, once something is counted, how much is done."""

    def __init__(self, label: str = "scoring", unit: str = "tokens", console: Console | None = None) -> None:
        """``console`` is where it is shown; None: below the cell of a notebook."""
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        column = TextColumn("{task.fields[line]}", markup=False)  # brackets in names are not markup
        self._bar = Progress(SpinnerColumn(), BarColumn(bar_width=20), column, console=console, transient=True)
        self._task = self._bar.add_task("", total=None, line=self)
        super().__init__(label, unit)

    def phase(self, words: str) -> None:
        super().phase(words)
        self._bar.reset(self._task, total=None)

    def changed(self) -> None:
        self._bar.update(self._task, completed=self.done, total=self.total)

    def __str__(self) -> str:
        return one_line(self.line())

    def __enter__(self) -> Self:
        self._bar.start()
        self.shown.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.shown.remove(self)
        self._bar.stop()


def shows_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Gives a verb a bar in notebooks, unless the caller gives a progress of their own.

    A caller who wants none raises the level of the logger: ``logging.getLogger("scoremode").setLevel("ERROR")``.
    """

    @functools.wraps(function)
    def shown(*arguments: P.args, **named: P.kwargs) -> T:
        if named.get("progress") is not None or not in_notebook() or not LOGGER.isEnabledFor(logging.WARNING):
            return function(*arguments, **named)
        with ProgressBar() as bar:
            named["progress"] = bar
            return function(*arguments, **named)

    return shown


def in_notebook() -> bool:
    """Does this code run in a kernel of Jupyter that can show a bar, which rich makes with ipywidgets?

    A console of IPython is a terminal, and has no kernel.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel") and find_spec("ipywidgets") is not None
