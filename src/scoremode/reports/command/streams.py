"""Standard streams that may be closed or full. A failed write is an error on standard output, not on standard error.

The streams may have any encoding. Characters that the encoding lacks are escaped as in JSON (\\u00b1). Control
characters in results are escaped too, because results may contain text from any file. JSON keeps its content, and no
text controls the terminal. Only the codes that colour a table are written unchanged, through ``styled``.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from textwrap import wrap
from typing import Any

from scoremode.errors import columns_of, escape, escaped

ESCAPE = "scoremode-escape"  # the error handler for characters that an encoding lacks
INSTEAD = (os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)
"""How /dev/null replaces a closed stream: input is empty, writing output fails, standard error is discarded."""


class Results(io.TextIOWrapper):
    """Standard output. Remembers its first failure, because argparse and other libraries ignore failures."""

    failure: OSError | None = None

    def write(self, text: str, /) -> int:
        self.write_styled(escaped(text))
        return len(text)

    def write_styled(self, text: str) -> int:
        """Writes text without escaping it, because its control characters are our own."""
        try:
            return super().write(text)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.failure = self.failure or error
            raise


class Complaints(io.TextIOWrapper):
    """Standard error. If it cannot be written, the text is dropped and the work continues."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def prepare() -> None:
    """Makes standard output and standard error usable, even if this process was started without them.

    Opens descriptors 0 to 2 if they are closed. Otherwise the next opened file would get one of these numbers, and
    anything that a library prints would be written into that file.
    """
    codecs.register_error(ESCAPE, _escape)
    for descriptor, mode in enumerate(INSTEAD):
        opened = os.open(os.devnull, mode)  # has the lowest number that is free
        if opened == descriptor:
            os.set_inheritable(opened, True)
        else:
            os.close(opened)
    sys.stdout = _wrap(Results, sys.stdout, 1)
    sys.stderr = _wrap(Complaints, sys.stderr, 2)


def for_terminal(line: str) -> str:
    """A line for standard error. If that is a terminal, it breaks between words, and not where the terminal ends."""
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        if sys.stderr.isatty() and (width := columns_of(sys.stderr)):
            return "\n".join(wrap(line, width, break_long_words=False, break_on_hyphens=False))
    return line


def check() -> None:
    """Raises the error that prevented a write to standard output, even if a library ignored the error."""
    if sys.stdout is not None:
        sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)
    if failure is not None:
        raise failure


def is_output_failure(error: OSError) -> bool:
    """Did this error come from standard output? If standard output is not a ``Results``, any broken pipe counts."""
    failure = getattr(sys.stdout, "failure", error if isinstance(error, BrokenPipeError) else None)
    # the same error may be raised again, by a flush of the remaining text or by the code that caught it
    both_broken = isinstance(failure, BrokenPipeError) and isinstance(error, BrokenPipeError)
    return both_broken or (failure is not None and failure.errno == error.errno)


def silence_output() -> None:
    """Discards buffered output that cannot be written. Otherwise Python would report the failure again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard output is not a real file, as in a test
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _wrap(kind: type[io.TextIOWrapper], stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Wraps Python's stream in the class ``kind``; makes a new stream if Python found the descriptor closed."""
    if stream is None:  # another file may have its number by now
        return kind(io.FileIO(os.open(os.devnull, INSTEAD[descriptor]), "w"), "utf-8", ESCAPE, write_through=True)
    settings = {name: getattr(stream, name) for name in ("encoding", "line_buffering", "write_through")}
    return kind(stream.detach(), errors=ESCAPE, **settings)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(escape, error.object[error.start : error.end])), error.end
