"""The console script. It imports almost nothing before it handles signals, because Ctrl-C may come early."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than all imports of this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code."""
    from scoremode.cli import commands

    return commands.run(sys.argv[1:] if arguments is None else arguments)


def entry() -> NoReturn:
    """Runs the console script ``scoremode``, then ends the process."""
    if TYPE_CHECKING:
        from signal import SIG_DFL, SIGHUP, SIGINT, SIGTERM, default_int_handler, getsignal, signal
    else:  # Python's own imports enum and functools first: a Ctrl-C meanwhile would print a traceback
        from _signal import SIG_DFL, SIGHUP, SIGINT, SIGTERM, default_int_handler, getsignal, signal

    before: dict[int, Any] = {number: getsignal(number) for number in (SIGINT, SIGTERM, SIGHUP)}
    for number, handler in before.items():
        if handler in (SIG_DFL, default_int_handler):
            signal(number, _end_at_once)
    from scoremode.console import signals

    try:
        signals.install(before)
        from scoremode.console import streams

        streams.prepare()
        code = main()
        signals.finish()
    except KeyboardInterrupt:  # outside the code in ``main`` that explains an interruption
        code = signals.exit_code() or 130
    try:
        sys.stderr.flush()
    except OSError:
        os._exit(code)  # standard error is full, and all else is written
    base = sys.modules.get("scoremode.core.engine.base")
    if code and (signals.exit_code() is not None or (base is not None and base.may_hang_at_exit)):
        # at exit, sockets of a library may wait for an engine that died; all our own files are written and closed
        os._exit(code)
    sys.exit(code)


def _end_at_once(number: int, _: object) -> NoReturn:
    """Ends the process at once on a signal that comes before any work has begun."""
    try:
        os.write(2, b"scoremode: %s; nothing was begun yet\n" % (b"interrupted" if number == 2 else b"terminated"))
    finally:
        os._exit(128 + number)
