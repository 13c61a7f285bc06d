"""The log on standard error: each record of the logger ``scoremode`` is one line, ``scoremode: …``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings

from scoremode.errors import LOGGER, one_line
from scoremode.reports.command.streams import for_terminal


class LineHandler(logging.Handler):
    """Writes a record as one line, safe for a terminal and in one flushed write, because other threads write too."""

    def emit(self, record: logging.LogRecord) -> None:
        line = getattr(record, "line", f"scoremode: {record.getMessage()}")  # see errors.print_line
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed or full
                print(f"{for_terminal(one_line(line))}\n", end="", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", help="more lines on standard error: details of what happens")
    parser.add_argument("--quiet", action="store_true", help="errors alone on standard error, and no progress line")


def install(*, verbose: bool = False, quiet: bool = False) -> None:
    """Sends the log to standard error only; may be called again to change how much is shown."""
    LOGGER.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    LOGGER.propagate = False
    warnings.showwarning = _show_warning
    if not any(isinstance(handler, LineHandler) for handler in LOGGER.handlers):
        LOGGER.addHandler(LineHandler())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Shows a library's warning as one line: those of torch may have twenty lines with frames of C++."""
    LOGGER.warning("a library warns: %s", str(message).strip().partition("\n")[0][:300])


def is_quiet() -> bool:
    return not LOGGER.isEnabledFor(logging.WARNING)
