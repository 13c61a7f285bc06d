"""Results on standard output, as tables, JSON or a page; rules that hold; and progress on standard error."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from scoremode.console.streams import is_quiet, lasting_stderr
from scoremode.core.arguments import seconds_in
from scoremode.core.verbs.progress import ProgressState
from scoremode.errors import one_line, readable

if TYPE_CHECKING:
    from scoremode.core.verbs.progress import Progress
    from scoremode.reports.table import Block

logger = logging.getLogger(__name__)
RULE_HOLDS = 1  # the exit code


def show(parsed: argparse.Namespace, facts: Callable[[], Any], blocks: Callable[[], Iterable[Block]]) -> None:
    """Prints the facts as JSON if ``--json`` was given, else the blocks as tables and text."""
    if parsed.json:
        print_json(facts())
    else:
        print_blocks(blocks())


def indented(value: Any) -> str:
    """A value as ``json.dumps(value, indent=1, …)`` writes it, ten times as fast: Python's own writer indents slowly.

    >>> indented({"a": [1, {"b": "é"}]}) == json.dumps({"a": [1, {"b": "é"}]}, indent=1, ensure_ascii=False)
    True
    """
    from msgspec.json import format as indent

    return indent(readable(json.dumps(value, ensure_ascii=False, allow_nan=False)), indent=1)


def print_json(value: Any) -> None:
    sys.stdout.write(indented(value) + "\n")


def print_json_list(values: Iterable[Mapping[str, Any]]) -> None:
    """Prints a list as ``print_json`` does, but holds only one of its objects in memory at a time."""
    opened = False
    for value in values:
        sys.stdout.write(",\n " if opened else "[\n ")
        sys.stdout.write(indented(value).replace("\n", "\n "))
        opened = True
    sys.stdout.write("\n]\n" if opened else "[]\n")


def print_blocks(blocks: Iterable[Block]) -> None:
    from scoremode.console.terminal import console, renderable

    out = console()
    for block in blocks:
        out.print(renderable(block))


@contextmanager
def progress_bar(label: str, unit: str = "tokens") -> Iterator[Progress | None]:
    """Yields a callback that shows progress: in a line of a terminal, else by a line every 30 seconds.

    With --quiet, or if standard error is closed, it yields None.
    """
    if sys.stderr is None or is_quiet():
        yield None
    elif sys.stderr.isatty():
        from scoremode.console.terminal import TerminalLine

        with lasting_stderr() as stream, TerminalLine(label, unit, stream) as line:
            yield line
    else:
        every = seconds_in("SCOREMODE_PROGRESS_SECONDS", 30.0, 1.0, "1 or more, as in 30")
        with lasting_stderr() as stream, ProgressLines(label, unit, every, stream) as lines:
            yield lines


class ProgressLines(ProgressState):
    """Prints a line every few seconds, whatever the verb does meanwhile: for logs of CI, containers and nohup."""

    def __init__(self, label: str, unit: str, every: float, stream: TextIO) -> None:
        super().__init__(label, unit)
        self._stream, self._every, self._ended = stream, every, threading.Event()
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
                print(f"scoremode: {one_line(self.line())}\n", end="", file=self._stream, flush=True)


def checked_report(parsed: argparse.Namespace, page: str | None = None) -> Any:
    """The file that ``--report`` names, checked before anything is scored, and with the page; None without it."""
    from scoremode.core.verbs.outputs import check_report

    if getattr(parsed, "report", None) is None:
        return None
    return check_report(parsed.report, "--report", page, made_later=getattr(parsed, "out", None))


def write_report(parsed: argparse.Namespace, output: Any, page: str) -> None:
    checked_report(parsed, page)
    output.write(page.encode())
    for_machines = any(getattr(parsed, flag, False) for flag in ("json", "markdown", "model_index"))
    output.announce(f"\nreport written to {output}", quiet=for_machines)


def command_line() -> str:
    """The command line as the user typed it, without secrets."""
    from scoremode.core.disk.manifests import command_without_secrets

    return " ".join(["scoremode", *map(shlex.quote, command_without_secrets(sys.argv[1:]))])


def verdict(checked: Sequence[str | None]) -> int:
    """Prints which rules hold, and returns the exit code."""
    failures = [why for why in checked if why]
    for why in failures:
        logger.error(why)
    return RULE_HOLDS if failures else 0
