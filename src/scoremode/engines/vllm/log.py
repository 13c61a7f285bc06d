"""The output of vLLM's processes goes to a log file: a user sees one line, and can still read everything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from scoremode.disk.folders import cache_folder
from scoremode.errors import ScoremodeError

ERROR_LINE = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception|Interrupt)): (.+)")
SAYS_NOTHING = ("Engine core initialization failed", "EngineCore encountered", "EngineDeadError", "WorkerProc init")
OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "Cannot allocate memory",
    "No available memory for the cache blocks",
)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a process may have been started without it
            with contextlib.suppress(OSError, ValueError):  # full or closed: not reported here
                stream.flush()


def _copy(descriptor: int) -> int | None:
    """A new descriptor for the same file, never 0, 1 or 2; None if the given one is closed."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return None


def _innermost(error: BaseException) -> str:
    """The innermost cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "…"


class VllmLog:
    """One engine's log file; ``SCOREMODE_VLLM_LOG=-`` leaves everything on standard error instead."""

    def __init__(self) -> None:
        wanted = os.environ.get("SCOREMODE_VLLM_LOG")
        # one file per engine: an old error must not explain a new failure
        name = f"vllm-{os.getpid()}-{uuid.uuid4().hex[:8]}.log"
        self.path = None if wanted == "-" else Path(wanted) if wanted else cache_folder() / "logs" / name

    @contextlib.contextmanager
    def taking_output(self) -> Iterator[None]:
        """Send standard output and error of this process and of those it starts to the file; restore ours afterwards.

        Processes started inside this block keep writing to the file. Descriptors belong to the whole process:
        anything that another thread prints meanwhile goes to the file too.
        """
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _flush()
        saved = {descriptor: _copy(descriptor) for descriptor in (1, 2)}
        with self.path.open("ab") as file:
            log = _copy(file.fileno())
        assert log is not None, "it was just opened"
        try:
            for descriptor in saved:
                os.dup2(log, descriptor)
            yield
        finally:
            _flush()
            for descriptor, mine in saved.items():
                if mine is None:
                    os.close(descriptor)
                else:
                    os.dup2(mine, descriptor)
                    os.close(mine)
            os.close(log)

    def text(self) -> str:
        if self.path is None or not self.path.exists():
            return ""
        return self.path.read_text(encoding="utf-8", errors="replace")

    def cause(self) -> str | None:
        """The last informative error in the log, in one line."""
        for line in reversed(self.text().splitlines()):
            found = ERROR_LINE.search(line)
            if found and not any(words in line for words in SAYS_NOTHING):
                return f"{found[1].split('.')[-1]}: {found[2].strip()}"[:300]
        return None

    def ran_out_of_memory(self) -> bool:
        return any(words in self.text() for words in OUT_OF_MEMORY)

    @contextlib.contextmanager
    def explaining(self, what: str, kind: type[ScoremodeError], fix: str = "") -> Iterator[None]:
        """Turn any exception of vLLM into one line: the cause that the log has, else the innermost exception."""
        try:
            yield
        except ScoremodeError:
            raise
        except Exception as error:
            why, where = self.cause() or _innermost(error), f"its log is {self.path or 'above'}"
            raise kind(f"{what} ({why})", fix=f"{fix}; {where}" if fix else where) from None

    def discard(self) -> None:
        """Delete the log of an engine that ended without an error."""
        if self.path is not None and not os.environ.get("SCOREMODE_VLLM_LOG"):
            self.path.unlink(missing_ok=True)
