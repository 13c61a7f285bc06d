"""Handles Ctrl-C, SIGTERM and SIGHUP: prints one line, exits with the right code and leaves nothing running.

The first signal raises ``Stopped`` in the main thread, so that files are closed and engines stopped on the way out.
A second signal, or a clean-up that takes longer than ``GRACE`` seconds, ends the process at once. All scores so far are
already on disk, because a run survives even SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading

TYPE_CHECKING = False  # importing typing takes longer than all other imports of this file
if TYPE_CHECKING:
    from typing import Any, NoReturn

GRACE = 10.0  # seconds
RESUME = "what was scored is kept: run the same command again to resume"
_kept = [RESUME]  # what the line says at its end
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal was closed"}
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides the cursor


class Stopped(KeyboardInterrupt):
    """A signal told this process to end. The class is a KeyboardInterrupt because libraries clean up after one."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def explain(error: KeyboardInterrupt) -> tuple[str, int]:
    """Returns the line to print and the exit code for an interruption."""
    number = error.number if isinstance(error, Stopped) else signal.SIGINT
    return f"{WORDS[signal.Signals(number)]}; {_kept[0]}", 128 + number


def nothing_is_kept(advice: str) -> None:
    """Tells an interrupted user that there is nothing to resume, and what to type to have it next time."""
    _kept[:] = [f"nothing was kept: {advice}"]


def everything_is_kept() -> None:
    """Tells an interrupted user to resume: so begins every command, of which a process may run several."""
    _kept[:] = [RESUME]


def _copy_of_standard_error() -> int:
    try:
        return fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return -1  # standard error is closed


class Signals:
    """The signal handlers of this process, active after ``install`` was called."""

    def __init__(self) -> None:
        self.received: Stopped | None = None
        self._finished: int | None = None  # the exit code, once all work is done
        self._told = False
        self._ending = threading.Lock()
        self._before: dict[int, Any] = {}
        self._terminal = -1  # a copy of standard error, because an engine that starts redirects descriptor 2

    def install(self, instead_of: Any = None) -> None:
        """Handles all signals except those that ``nohup`` or a shell's ``&`` already made this process ignore.

        ``instead_of`` is the temporary handler that has replaced Python's own since the process began.
        """
        _installed.append(self)
        self._terminal = _copy_of_standard_error()
        for number in WORDS:
            before = signal.getsignal(number)
            before = signal.default_int_handler if before is instead_of else before
            if before in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = before
                signal.signal(number, self._handle)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="scoremode-signals", daemon=True).start()
        os.register_at_fork(after_in_child=self._forget)
        sys.unraisablehook = self._unraisable

    def tell(self, error: KeyboardInterrupt) -> int:
        """Prints the line only once, and not through Python's streams, which may be broken; returns the exit code."""
        line, code = explain(error)
        streams = sys.modules.get("scoremode.reports.command.streams")  # nothing is imported while the process ends
        line = streams.for_terminal(f"scoremode: {line}") if streams is not None else f"scoremode: {line}"
        words = (SHOW_CURSOR if os.isatty(self._terminal) else b"") + f"{line}\n".encode()
        try:
            if not self._told:
                self._told = True
                os.write(self._terminal, words)
        except OSError:
            pass  # there is no stream left to write to
        return code

    def finish(self, code: int) -> None:
        """Records the exit code when all work is done; from then on, a signal only makes the process end sooner."""
        self._finished = code

    def _handle(self, number: int, _: object) -> None:
        if self._finished is not None or self.received is not None:
            self._end(number)
        self.received = Stopped(number)
        raise self.received

    def _watch(self, reader: int) -> None:
        """Ends the process if the main thread hangs: Python handles signals only between two steps of that thread."""
        numbers: list[int] = []
        while len(numbers) < 2:
            ready, _, _ = select.select([reader], [], [], GRACE if numbers else None)
            byte = os.read(reader, 1) if ready else b""
            if ready and byte and byte[0] not in self._before:
                continue  # a signal that we do not handle
            numbers.append(byte[0] if byte else numbers[0])
        self._end(numbers[0])

    def _end(self, number: int) -> NoReturn:
        """Ends the process at once, and prints the line. Processes of an engine end with this one."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is already ending the process
        if self._finished is not None:
            os._exit(self._finished)
        os._exit(self.tell(self.received or Stopped(number)))

    def _unraisable(self, unraisable: Any) -> None:
        """Ends the process after an interruption in a destructor or callback, where the main thread never sees it.

        Other errors in destructors come from libraries and are hidden, because our own line says what went wrong.
        """
        if self.received is not None and not isinstance(unraisable.exc_value, Exception):
            self._end(self.received.number)
        if os.environ.get("SCOREMODE_DEBUG"):
            sys.__unraisablehook__(unraisable)

    def _forget(self) -> None:
        """Restores the earlier handlers in a forked process, because we do not explain its signals."""
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)
        sys.unraisablehook = sys.__unraisablehook__


_installed: list[Signals] = []


def tell_if_stopped() -> int | None:
    """If a signal is ending this process, prints the line that says so and returns the exit code; else returns None.

    The signal itself is looked up, because libraries may have turned its exception into another one.
    """
    watch = _installed[-1] if _installed else None
    return watch.tell(watch.received) if watch is not None and watch.received is not None else None
