"""Progress that a thread of its own renews now and then, such as a bar in a notebook."""

from __future__ import annotations

import functools
import html
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, Self, TypeVar

from scoremode.core.verbs.progress import ProgressState
from scoremode.errors import LOGGER, one_line

P = ParamSpec("P")
T = TypeVar("T")


class TickingDisplay(ProgressState):
    """A display that a thread of its own renews every few seconds, also while a library is imported."""

    def __init__(self, label: str, unit: str, every: float) -> None:
        super().__init__(label, unit)
        self._every, self._ended = every, threading.Event()
        self._thread = threading.Thread(target=self._run, name="scoremode-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.shown.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.shown.remove(self)
        self._ended.set()
        self._thread.join(timeout=1.0)  # a pipe that nobody reads may hold it up

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            with suppress(OSError, ValueError):  # the stream may be closed or full
                self.tick()

    def tick(self) -> None:
        """Shows the present state."""
        raise NotImplementedError


class NotebookBar(TickingDisplay):
    """Shows a bar below the cell of a notebook, and removes it at the end."""

    def __init__(self, every: float = 0.5) -> None:
        super().__init__("scoring", "tokens", every)
        self._handle: Any = None

    def __enter__(self) -> Self:
        from IPython.display import display

        self._handle = display(self._content(), raw=True, display_id=True)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._handle.update({"text/html": "", "text/plain": ""}, raw=True)

    def tick(self) -> None:
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """The bar as HTML and as text. Names of models and files are escaped."""
        line = one_line(self.line())
        share = f' value="{self.done}" max="{self.total}"' if self.total else ""
        bar = f'<progress{share} style="width:16em;vertical-align:middle"></progress>'
        return {"text/html": f"<div>{bar} {html.escape(line)}</div>", "text/plain": line}


def shows_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Gives a verb a bar in notebooks, unless the caller gives a progress of their own.

    A caller who wants none raises the level of the logger: ``logging.getLogger("scoremode").setLevel("ERROR")``.
    """

    @functools.wraps(function)
    def shown(*arguments: P.args, **named: P.kwargs) -> T:
        if named.get("progress") is not None or not in_notebook() or not LOGGER.isEnabledFor(logging.WARNING):
            return function(*arguments, **named)
        with NotebookBar() as bar:
            named["progress"] = bar
            return function(*arguments, **named)

    return shown


def in_notebook() -> bool:
    """Does this code run in a kernel of Jupyter? A console of IPython is a terminal, and has no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
