"""Tells on stderr that a server is starting, until it accepts connections. A program that imports nothing else.

The server replaces the process that started it, so nothing of scoremode is left there to say how it goes. This program
is a child of that process, and ends with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

EVERY = 15.0  # seconds between two lines


def watch(host: str, port: int, parent: int, *, every: float = EVERY, poll: float = 0.5) -> None:
    """Prints a line every ``every`` seconds, and one when a server accepts connections; ends if the parent does."""
    began, lines = time.monotonic(), 0
    while os.getppid() == parent:
        passed = time.monotonic() - began
        try:
            socket.create_connection((host, port), timeout=every).close()
        except OSError:
            if passed >= every * (lines + 1):
                lines += 1
                _say(f"vLLM is still starting: loading weights or warming up ({passed:.0f} s so far)")
            time.sleep(poll)
        else:
            _say(f"ready after {passed:.0f} s: the server answers at {host}:{port}")
            return


def _say(line: str) -> None:
    print(f"scoremode: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C stops the server and this, without a traceback
    watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
