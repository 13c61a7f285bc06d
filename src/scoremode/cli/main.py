"""The console script. It imports almost nothing before it handles signals, because Ctrl-C may come early."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than all imports of this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code."""
    from scoremode.cli import commands

    return commands.run(sys.argv[1:] if arguments is None else arguments)


def entry() -> NoReturn:
    """Runs the console script ``scoremode``, then ends the process."""
    if TYPE_CHECKING:
        from signal import SIGINT, default_int_handler, getsignal, signal
    else:  # Python's own imports enum and functools first: a Ctrl-C meanwhile would print a traceback
        from _signal import SIGINT, default_int_handler, getsignal, signal

    is_usual = getsignal(SIGINT) is default_int_handler
    if is_usual:
        signal(SIGINT, _end_at_once)
    from scoremode.reports.command import signals

    if is_usual:
        signal(SIGINT, default_int_handler)
    try:
        signals.install()
        from scoremode.reports.command import streams

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
    """Ends the process at once on a Ctrl-C that comes before any work has begun."""
    try:
        os.write(2, b"scoremode: interrupted; nothing was begun yet\n")
    finally:
        os._exit(128 + number)
