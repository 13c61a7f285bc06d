"""Standard output and standard error of the command line, and the log: each of its records is one line.

Standard output may have any encoding. What it lacks is escaped as in JSON (\\u00b1), and so are control characters in
results, because these may contain text from any file: JSON keeps its content, and no text controls the terminal. Only
the codes that colour a table are written unchanged, through ``write_styled``.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from textwrap import wrap
from typing import Any, TextIO

from scoremode.errors import LOGGER, InputError, columns_of, escape, escaped, one_line

ESCAPE = "scoremode-escape"  # the error handler for characters that an encoding lacks
COPIED = re.compile(  # a command after words that introduce it, a flag and its value, a quoted name
    r"(?:(?<=[:;] )|(?<=\btype )|(?<=\buse )|(?<=\bas in )|(?<=\bor ))"
    r"(?:scoremode|pip|python|ray|iconv|git|hf) [^;,]*|--[a-z][\w-]* [^\s;,]+|(?<= )'[^']*'"
)


class StandardOutput(io.TextIOWrapper):
    """Standard output. A reader that left ends the command quietly, and any other failure is an error in words."""

    def write(self, text: str, /) -> int:
        self.write_styled(escaped(text))
        return len(text)

    def write_styled(self, text: str) -> int:
        """Writes text without escaping it, because its control characters are our own."""
        with self._failures_told():
            return super().write(text)

    def flush(self) -> None:
        with self._failures_told():
            super().flush()

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            discard(1)
            if isinstance(error, BrokenPipeError):  # as in ``| head -1``: nothing more to say to it
                raise SystemExit(0) from None
            reasons = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk is full", errno.EBADF: "it is closed"}
            why = reasons.get(error.errno or 0, error.strerror)
            fix = "send it to a file or a terminal that takes it"
            raise InputError(f"standard output could not be written: {why}", fix=fix) from None


@contextlib.contextmanager
def lasting_stderr() -> Iterator[TextIO]:
    """Yields standard error on a descriptor of its own, for progress while an engine sends descriptor 2 to a log."""
    try:
        file = io.FileIO(os.dup(sys.stderr.fileno()), "w")
    except (OSError, ValueError, AttributeError):  # it is no file, as in a test
        yield sys.stderr
        return
    # without a buffer, whose lock a writer would keep while nobody reads the pipe
    with io.TextIOWrapper(file, sys.stderr.encoding, "backslashreplace", write_through=True) as stream:
        yield stream


def prepare() -> None:
    """Makes standard output ours, and replaces streams that this process was started without by /dev/null.

    Otherwise the next opened file would get one of their numbers, and what a library prints would be written into it.
    A standard output that is closed cannot be written to: results that nobody gets are an error.
    """
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        opened = os.open(os.devnull, mode)  # has the lowest number that is free
        if opened == descriptor:
            os.set_inheritable(opened, True)
        else:
            os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    codecs.register_error(ESCAPE, _escape)
    encoding = "utf-8" if sys.stdout is None else sys.stdout.encoding
    binary = open(1, "wb", closefd=False)  # noqa: SIM115
    sys.stdout = StandardOutput(binary, encoding, ESCAPE, line_buffering=os.isatty(1))


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Escapes what an encoding lacks as JSON does, so that JSON keeps its content."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(escape, error.object[error.start : error.end])), error.end


def for_terminal(line: str) -> str:
    """A line for standard error. If that is a terminal, it breaks between words that nobody copies together."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
        if sys.stderr.isatty() and (width := columns_of(sys.stderr)):
            joined = COPIED.sub(lambda match: match[0].replace(" ", "\0"), line)
            return "\n".join(wrap(joined, width, break_long_words=False, break_on_hyphens=False)).replace("\0", " ")
    return line


def discard(descriptor: int) -> None:
    """Sends what else is written there to nowhere: Python would report the failure again when the process ends."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


# ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class LineHandler(logging.Handler):
    """Writes a record as one line, safe for a terminal and in one flushed write, because other threads write too."""

    def emit(self, record: logging.LogRecord) -> None:
        line = getattr(record, "line", f"scoremode: {record.getMessage()}")  # see errors.print_line
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed or full
            print(f"{for_terminal(one_line(line))}\n", end="", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser, *, short: bool) -> None:
    verbose, quiet = (["-v"], ["-q"]) if short else ([], [])
    parser.add_argument(*verbose, "--verbose", action="store_true", help="more lines on standard error: details")
    parser.add_argument(*quiet, "--quiet", action="store_true", help="errors alone on standard error, and no progress")


def show_log(*, verbose: bool = False, quiet: bool = False) -> None:
    """Sends the log to standard error only; may be called again to change how much is shown."""
    if LOGGER.level != (level := logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO):
        LOGGER.setLevel(level)  # goes through all loggers of all libraries
    LOGGER.propagate = False
    warnings.showwarning = _show_warning
    if not any(isinstance(handler, LineHandler) for handler in LOGGER.handlers):
        LOGGER.addHandler(LineHandler())


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Shows a library's warning as one line: those of torch may have twenty lines with frames of C++."""
    LOGGER.warning("a library warns: %s", str(message).strip().partition("\n")[0][:300])


def is_quiet() -> bool:
    return not LOGGER.isEnabledFor(logging.WARNING)
