"""Ctrl-C, SIGTERM and SIGHUP: one line and the right exit code. All scores so far are on disk: a run survives SIGKILL.

The first signal raises KeyboardInterrupt in the main thread, after which libraries clean up: files are closed and
engines stopped on the way out. A second one ends the process at once. So does the first one while a module is imported:
libraries in C import others when they are loaded, and some do not expect that to fail (an interruption while pyarrow
imports datetime is a SIGSEGV).
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from scoremode.console.streams import for_terminal

RESUME = "what was scored is kept: run the same command again to resume"
RESUME_WITHOUT = "what was scored is kept: run the same command again, without --fresh, to resume"
NOTHING_NEW = "nothing new was kept yet"
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal was closed"}
LINE_START = "\r\x1b[K\x1b[?25h"  # a progress bar leaves a half line and hides the cursor
_advice = [NOTHING_NEW, RESUME]  # what the line says at its end: before anything was kept, and after that
_received: list[int] = []
_replaced: dict[int, Any] = {}
_terminal = [2]  # standard error; then a copy, because an engine that starts redirects descriptor 2


def nothing_is_kept(advice: str) -> None:
    """Tells an interrupted user that there is nothing to resume, and what to type to have it next time."""
    _advice[:] = [f"nothing was kept: {advice}"] * 2


def everything_is_kept(*, fresh: bool = False) -> None:
    """Tells an interrupted user to resume, if something was scored; ``fresh``: the command would begin again."""
    _advice[:] = [NOTHING_NEW, RESUME_WITHOUT if fresh else RESUME]


def line(number: int = signal.SIGINT) -> str:
    records = getattr(sys.modules.get("scoremode.core.disk.records"), "RecordFile", None)  # no imports in a handler
    return f"{WORDS[signal.Signals(number)]}; {_advice[bool(getattr(records, 'any_kept', False))]}"


def exit_code() -> int | None:
    """The exit code, if a signal is ending this process; libraries may have turned its exception into another one."""
    return 128 + _received[0] if _received else None


def install(before: Mapping[int, Any] | None = None) -> None:
    """Handles all signals except those that ``nohup`` or a shell's ``&`` already made this process ignore.

    ``before``: the handlers that there were, if the command line has replaced them already.
    """
    with suppress(OSError):  # standard error is closed
        _terminal[:] = [fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)]
    for number, handler in (before or {number: signal.getsignal(number) for number in WORDS}).items():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            _replaced[number] = handler
            signal.signal(number, _stop)
    os.register_at_fork(after_in_child=_forget)
    sys.unraisablehook = _unraisable


def finish() -> None:
    """From now on, when all work is done, signals change nothing."""
    for number in _replaced:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _replaced:
        signal.signal(other, signal.SIG_DFL)
    _received.append(number)
    with suppress(OSError):  # there is no stream left to write to
        start = LINE_START if os.isatty(_terminal[0]) else ""
        os.write(_terminal[0], f"{start}{for_terminal(f'scoremode: {line(number)}')}\n".encode())
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(unraisable: Any) -> None:
    """Ends the process if a destructor swallowed an interruption. Other errors of destructors are libraries' own."""
    if _received and not isinstance(unraisable.exc_value, Exception):
        os._exit(128 + _received[0])
    if os.environ.get("SCOREMODE_DEBUG"):
        sys.__unraisablehook__(unraisable)


def _forget() -> None:
    """Restores the earlier handlers in a forked process, because we do not explain its signals."""
    for number, before in _replaced.items():
        signal.signal(number, before)
