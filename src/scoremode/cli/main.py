"""The console script. It imports next to nothing before its signal handlers are there: Ctrl-C may come at any time."""

from __future__ import annotations

import os
import sys

from scoremode.cli import signals

TYPE_CHECKING = False  # typing itself takes longer to import than all that is imported here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    from scoremode.cli import commands

    return commands.run(sys.argv[1:] if arguments is None else arguments)


def entry() -> NoReturn:
    """The console script."""
    watch = signals.Signals()
    try:
        watch.install()
        code = _run_with_streams()
        watch.finish(code)
    except KeyboardInterrupt as error:  # before or after what ``main`` explains
        code = watch.tell(error)
    leftovers = sys.modules.get("scoremode.engines.leftovers")
    if code and (watch.received is not None or (leftovers is not None and leftovers.hanging)):
        # sockets of a library may wait at exit for an engine that died; everything of ours is closed and written
        os._exit(code)
    sys.exit(code)


def _run_with_streams() -> int:
    from scoremode.cli import streams

    streams.prepare()
    code = main()
    sys.stderr.flush()
    return code
