"""If llama.cpp ends the process, the user sees one line and exit code 2, not a stack trace and a signal.

llama.cpp aborts where a check of its own fails, lets some C++ exceptions through, and may crash on an unforeseen file.
None of that can become a Python exception. Nothing is lost by ending: a journal survives even SIGKILL, and locks end
with the process. ``SCOREMODE_DEBUG=1`` leaves crashes alone, for a debugger.
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

from scoremode.engines import process_guard
from scoremode.errors import one_line

EXIT_CODE = 2  # 1 would say that a rule of --fail-if failed
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
REMEDY = "the file is damaged, or an option is beyond what llama.cpp can do"
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it
SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate
RAW_LINE = re.compile(r"(?:ggml|gguf|llama)\w*: .*")

_standard_error = [2]  # the last one is the user's, while descriptor 2 is redirected
_redirecting = threading.RLock()


def install(functions: Any) -> tuple[Any, ...]:
    """Installs a handler for every way in which llama.cpp ends a process; returns the handlers, to keep them alive."""
    aborted = ctypes.CFUNCTYPE(None, c_char_p)(_aborted)
    functions.ggml_set_abort_callback(ctypes.cast(aborted, c_void_p))
    if os.environ.get("SCOREMODE_DEBUG"):
        return (aborted,)
    uncaught = ctypes.CFUNCTYPE(None)(_uncaught)
    with contextlib.suppress(AttributeError):  # another C++ library than the usual ones
        set_terminate = getattr(functions, SET_TERMINATE)
        set_terminate.restype, set_terminate.argtypes = c_void_p, (c_void_p,)
        set_terminate(ctypes.cast(uncaught, c_void_p))
    # Python's own handlers return to the instruction that crashed, so this one is given to the C library
    crashed = ctypes.CFUNCTYPE(None, c_int)(_crashed)
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = c_void_p, (c_int, c_void_p)
    for number in CRASHES:
        before = set_handler(number, ctypes.cast(crashed, c_void_p))
        if before:  # somebody else's, such as faulthandler's
            set_handler(number, before)
    return aborted, uncaught, crashed


def _aborted(message: bytes | None) -> None:
    words = (message or b"").decode("utf-8", "replace").strip()
    _end(f"llama.cpp ended this process: {re.sub(r'^[^ ]*/', '', words)[-300:]}")


def _uncaught() -> None:
    _end("llama.cpp ended this process with a C++ exception, perhaps because the memory is used up")


def _crashed(number: int) -> None:
    _end(f"llama.cpp crashed this process ({signal.Signals(number).name})")


def _end(words: str) -> NoReturn:
    for kill in process_guard.kill_hooks:
        kill()
    descriptor = _standard_error[-1]
    line = f"scoremode: {one_line(words)}; {REMEDY}\n".encode()
    with contextlib.suppress(OSError):
        os.write(descriptor, (SHOW_CURSOR if os.isatty(descriptor) else b"") + line)
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def raw_lines_into(complaints: deque[str]) -> Iterator[None]:
    """Catches the few complaints that ggml prints on standard error instead of its log.

    They are added to ``complaints`` only if nothing was logged. Descriptors belong to the whole process: anything that
    another thread prints meanwhile, such as a progress bar, is lost.
    """
    with _redirecting, tempfile.TemporaryFile(prefix="scoremode-") as file:
        try:
            users = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:  # closed: nothing can be printed
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
