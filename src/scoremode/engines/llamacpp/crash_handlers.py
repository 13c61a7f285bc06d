"""Prints one line and exits with code 2 if llama.cpp ends the process, instead of a stack trace and a signal.

llama.cpp aborts if one of its own checks fails, lets some C++ exceptions through, and may crash on an unexpected file.
None of these can become a Python exception. Ending the process loses nothing: a journal survives even SIGKILL, and the
system releases locks. With ``SCOREMODE_DEBUG=1``, crashes are not handled, so that a debugger sees them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_void_p
from typing import Any, NoReturn

from scoremode.errors import one_line

EXIT_CODE = 2  # not 1, which means that a rule of --fail-if failed
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
REMEDY = "the file is damaged, or an option is beyond what llama.cpp can do"
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides the cursor
SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate
RAW_LINE = re.compile(r"(?:ggml|gguf|llama)\w*: .*")

_standard_error = [2]  # while descriptor 2 is redirected, the last entry is the user's standard error
_redirecting = threading.RLock()


def install(functions: Any) -> tuple[Any, ...]:
    """Installs a handler for each way in which llama.cpp ends a process. Returns the handlers, to keep them alive."""
    aborted = ctypes.CFUNCTYPE(None, c_char_p)(_aborted)
    functions.ggml_set_abort_callback(ctypes.cast(aborted, c_void_p))
    if os.environ.get("SCOREMODE_DEBUG"):
        return (aborted,)
    uncaught = ctypes.CFUNCTYPE(None)(_uncaught)
    with contextlib.suppress(AttributeError):  # an unusual C++ library
        set_terminate = getattr(functions, SET_TERMINATE)
        set_terminate.restype, set_terminate.argtypes = c_void_p, (c_void_p,)
        set_terminate(ctypes.cast(uncaught, c_void_p))
    # a handler set in Python would return to the instruction that crashed, so this one is set in the C library
    crashed = ctypes.CFUNCTYPE(None, c_int)(_crashed)
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = c_void_p, (c_int, c_void_p)
    for number in CRASHES:
        before = set_handler(number, ctypes.cast(crashed, c_void_p))
        if before:  # another handler was installed, such as faulthandler's: restore it
            set_handler(number, before)
    return aborted, uncaught, crashed


def _aborted(message: bytes | None) -> None:
    text = (message or b"").decode("utf-8", "replace").strip()
    _end(f"llama.cpp ended this process: {re.sub(r'^[^ ]*/', '', text)[-300:]}")


def _uncaught() -> None:
    _end("llama.cpp ended this process with a C++ exception, perhaps because the memory is used up")


def _crashed(number: int) -> None:
    _end(f"llama.cpp crashed this process ({signal.Signals(number).name})")


def _end(message: str) -> NoReturn:
    descriptor = _standard_error[-1]
    line = f"scoremode: {one_line(message)}; {REMEDY}\n".encode()
    with contextlib.suppress(OSError):
        os.write(descriptor, (SHOW_CURSOR if os.isatty(descriptor) else b"") + line)
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def raw_lines_into(complaints: deque[str]) -> Iterator[None]:
    """Catches the few error lines that ggml prints to standard error instead of its log.

    The lines are added to ``complaints`` only if nothing was logged. Descriptor 2 belongs to the whole process: text
    that another thread prints in the meantime, such as a progress bar, is lost.
    """
    with _redirecting, tempfile.TemporaryFile(prefix="scoremode-") as file:
        try:
            users = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:  # standard error is closed, so nothing can be printed
            yield
            return
        _standard_error.append(users)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(users, 2)
            _standard_error.pop()
            os.close(users)
        if not complaints:
            file.seek(0)
            complaints.extend(RAW_LINE.findall(file.read().decode("utf-8", "replace")))
