"""The console script. It imports almost nothing before it installs a signal handler, because Ctrl-C may come early.

Until Python has imported its ``site`` module and this package, no handler is installed. Ctrl-C then ends the process
without a message, or with Python's traceback.
"""

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
    # Python's ``signal`` imports enum, functools and collections. A Ctrl-C during these imports would print a traceback
    if TYPE_CHECKING:
        from signal import SIGINT, default_int_handler, getsignal, signal
    else:
        from _signal import SIGINT, default_int_handler, getsignal, signal

    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _end_at_once)
    from scoremode.reports.command import signals

    watch = signals.Signals()
    try:
        watch.install(instead_of=_end_at_once)
        from scoremode.reports.command import streams

        streams.prepare()
        code = main()
        sys.stderr.flush()
        watch.finish(code)
    except KeyboardInterrupt as error:  # outside the code in ``main`` that explains an interruption
        code = watch.tell(error)
    base = sys.modules.get("scoremode.core.engine.base")
    if code and (watch.received is not None or (base is not None and base.may_hang_at_exit)):
        # at exit, sockets of a library may wait for an engine that died; all our own files are written and closed
        os._exit(code)
    sys.exit(code)


def _end_at_once(number: int, _: object) -> NoReturn:
    """Ends the process at once on a Ctrl-C that comes before any work has begun."""
    try:
        os.write(2, b"scoremode: interrupted; nothing was begun yet\n")
    finally:
        os._exit(128 + number)
