"""A server in a process of its own: a free port, waiting until it answers, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Self

from tests import forked

SECONDS = 600  # on a machine that is busy with other things


class LocalServer:
    """A server on this machine. It can be killed and started again at the same address."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self, words: list[str], environment: dict[str, str]) -> Self:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = forked.VllmPopen(
                words, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
            )
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start: {self.said()[-3000:]}")

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """All of its processes, at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
