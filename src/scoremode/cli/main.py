"""The console script. It imports next to nothing before a signal handler is there: Ctrl-C may come at any time.

What comes earlier is Python's own: until its ``site`` module and this package are imported, Ctrl-C ends the process
without a word, or with Python's traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all that is imported here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code."""
    from scoremode.cli import commands

    return commands.run(sys.argv[1:] if arguments is None else arguments)


def entry() -> NoReturn:
    """Runs the console script ``scoremode``, then ends the process."""
    # Python's ``signal`` imports enum, functools and collections: a moment in which Ctrl-C would be a traceback
    if TYPE_CHECKING:
        from signal import SIGINT, default_int_handler, getsignal, signal
    else:
        from _signal import SIGINT, default_int_handler, getsignal, signal

    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _end_at_once)
    from scoremode.cli import signals

    watch = signals.Signals()
    try:
        watch.install(instead_of=_end_at_once)
        code = _run_with_streams()
        watch.finish(code)
    except KeyboardInterrupt as error:  # before or after what ``main`` explains
        code = watch.tell(error)
    process_guard = sys.modules.get("scoremode.engines.process_guard")
    if code and (watch.received is not None or (process_guard is not None and process_guard.hanging)):
        # sockets of a library may wait at exit for an engine that died; everything of ours is closed and written
        os._exit(code)
    sys.exit(code)


def _end_at_once(number: int, _: object) -> NoReturn:
    """Handles a Ctrl-C that comes before any work was begun: ends the process at once."""
    try:
        os.write(2, b"scoremode: interrupted; nothing was begun yet\n")
    finally:
        os._exit(128 + number)


def _run_with_streams() -> int:
    from scoremode.cli import streams

    streams.prepare()
    code = main()
    sys.stderr.flush()
    return code
