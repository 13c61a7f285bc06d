"""What must happen when this process ends early. Engines that start processes of their own register it here.

The command line reads these lists from a signal handler, so this file imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

kill: list[Callable[[], None]] = []
"""Called when the process must end at once: each kills the processes that its engine started."""

hanging: list[str] = []
"""Engines whose libraries may wait forever at exit after a failure: after an error the process ends at once."""
