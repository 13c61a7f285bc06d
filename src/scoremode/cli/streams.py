"""Standard streams that may be closed or full: results that cannot be printed are an error, complaints are not.

They may have any encoding. Characters that it lacks are escaped as in JSON (\\u00b1), and so are control characters in
results, which may come from anybody's file: JSON stays JSON with the same content, and a terminal obeys nothing of it.
Only what colours a table passes by, through ``styled``.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import Any

from scoremode.errors import escape, escaped

ESCAPE = "scoremode-escape"  # what happens to characters that an encoding lacks


class Results(io.TextIOWrapper):
    """Standard output. Remembers its first failure, because argparse and other libraries ignore it."""

    failure: OSError | None = None

    def write(self, text: str, /) -> int:
        self.write_styled(escaped(text))
        return len(text)

    def write_styled(self, text: str) -> int:
        """Writes text without escaping it: its control characters are our own."""
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
    """Standard error. If it cannot be written, nothing is said and the work continues."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def prepare() -> None:
    """Make standard output and error of this process usable, whatever it was started with.

    Descriptors 0 to 2 are filled if they are closed. Otherwise the next file that is opened would take their place, and
    whatever a library prints would be written into it.
    """
    codecs.register_error(ESCAPE, _escape)
    closed = {descriptor for descriptor in (0, 1, 2) if not _is_open(descriptor)}
    for descriptor in sorted(closed):
        _fill(descriptor)
    sys.stdout = _wrap(Results, sys.stdout, 1)
    sys.stderr = _wrap(Complaints, sys.stderr, 2)


def check() -> None:
    """Raises the error that kept standard output from being written, even if a library ignored it."""
    if sys.stdout is not None:
        sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)
    if failure is not None:
        raise failure


def is_output_failure(error: OSError) -> bool:
    """Did this error come from standard output? If that is not a ``Results``, a broken pipe counts as one."""
    failure = getattr(sys.stdout, "failure", error if isinstance(error, BrokenPipeError) else None)
    # the same may be raised again, when what is left is flushed, or by the code that caught it
    both_broken = isinstance(failure, BrokenPipeError) and isinstance(error, BrokenPipeError)
    return both_broken or (failure is not None and failure.errno == error.errno)


def silence_output() -> None:
    """Discards what is still buffered: it cannot be written, and Python would complain again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a real file, as under a test
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _fill(descriptor: int) -> None:
    """Opens /dev/null as a closed descriptor: input is empty, writing output fails, standard error is discarded."""
    opened = os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)


def _wrap(kind: type[io.TextIOWrapper], stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Makes a stream of class ``kind`` from Python's, or a new one if Python found the descriptor closed."""
    if stream is None:
        return kind(io.FileIO(_unwritable(descriptor), "w"), "utf-8", ESCAPE, write_through=True)
    settings = {name: getattr(stream, name) for name in ("encoding", "line_buffering", "write_through")}
    return kind(stream.detach(), errors=ESCAPE, **settings)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(escape, error.object[error.start : error.end])), error.end


def _unwritable(descriptor: int) -> int:
    """Opens /dev/null for a descriptor that was closed when Python started: another file may have its number now."""
    return os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
