"""What must happen when this process ends early: engines that start processes of their own register it here.

The command line looks here from a signal handler, so this imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

kill: list[Callable[[], None]] = []
"""Called when the process is told to end at once: each kills the processes that its engine started."""

hanging: list[str] = []
"""Engines whose libraries may wait forever at exit after a failure: after an error the process ends at once."""
