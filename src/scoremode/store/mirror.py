"""While a run is scored here, a thread sends what is new to the folder elsewhere, and renews the lease.

What fails is tried again, less and less often; scoring goes on meanwhile, and one line says so. A lease that was lost
stops the thread; ``check`` raises then.
"""

from __future__ import annotations

import threading
import time

from scoremode.errors import StorageError, print_line
from scoremode.store.leases import Lease, LeaseLostError
from scoremode.store.segments import Sender

TICK = 0.25  # seconds
OFTEN, SELDOM = 5.0, 60.0  # seconds between two pieces: at the beginning, and later
SHARE = 0.01  # of the time so far that a lost machine may cost
MUCH = 8 << 20  # bytes that are sent before their time
RENEWALS = 6  # of a lease, within the time that it counts
LONGEST_PAUSE = 30.0  # seconds between two attempts


class Mirror:
    """Sends a growing file and renews a lease, from ``start`` until ``stop``."""

    def __init__(self, lease: Lease, sender: Sender | None, name: str, *, seldom: bool = False) -> None:
        """``sender`` None only renews; ``seldom`` waits ten minutes between two pieces."""
        self._lease, self._sender, self._name = lease, sender, name
        self._least = 600.0 if seldom else OFTEN
        self._lost: LeaseLostError | None = None
        self._ended = threading.Event()
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()
        self._failing = False

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="scoremode-mirror", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """LeaseLostError if the thread found that another writer has the folder."""
        if self._lost is not None:
            raise self._lost

    def send_from_now(self, sender: Sender | None) -> None:
        """Send this file from now on; None: no more."""
        with self._sending:
            self._sender = sender

    def stop(self) -> None:
        """End the thread. What it is sending is sent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        renewed = sent = time.monotonic()
        pause, wait_until = TICK, 0.0
        while not self._ended.wait(TICK):
            now = time.monotonic()
            if now < wait_until:
                continue
            try:
                if now - renewed >= self._lease.seconds / RENEWALS:
                    self._lease.renew()
                    renewed = now
                if self._is_due(now - sent):
                    self._send()
                    sent = now
            except LeaseLostError as error:
                self._lost = error
                return
            except (StorageError, OSError) as error:
                self._say_failing(error)
                pause = min(2 * pause, LONGEST_PAUSE, self._lease.seconds / RENEWALS)
                wait_until = now + pause
            else:
                pause = TICK
                self._say_working()

    def _is_due(self, since: float) -> bool:
        with self._sending:
            waiting = self._sender.waiting() if self._sender is not None else 0
        interval = max(self._least, min(SELDOM, SHARE * (time.monotonic() - self._began)))
        return waiting > 0 and (since >= interval or (waiting >= MUCH and self._least == OFTEN))

    def _send(self) -> None:
        with self._sending:
            if self._sender is not None:
                self._sender.send()

    def _say_failing(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            words = error.message if isinstance(error, StorageError) else str(error)
            _say(f"{words}; scoring goes on, and what is scored stays here until it can be sent")

    def _say_working(self) -> None:
        if self._failing:
            self._failing = False
            _say(f"{self._name} can be written again")


def _say(line: str) -> None:
    print_line(f"scoremode: {line}")
