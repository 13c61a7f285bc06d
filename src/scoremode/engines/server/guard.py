"""Is it still the same server? Scores of two models must never be mixed in one run.

An answer is kept only if the server was found unchanged at a time after it came. What is looked at: the name and
fingerprint in every answer, new connections (a server that was started again cannot have the old ones), and, at every
one of these and now and then, what the server says of itself and its scores of the probe.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from scoremode.engines.server.forms import Form, Scored
from scoremode.engines.server.link import Link
from scoremode.engines.server.probe import UNCHANGED, Probe, distance
from scoremode.engines.server.served import Served, look, score
from scoremode.errors import EngineError, ModelError

EVERY = 60.0  # seconds


class Guard:
    """Compares a server with what it was when the run began; has a connection of its own."""

    def __init__(self, link: Link, served: Served, form: Form, probe: Probe) -> None:
        self.link, self.served, self.form, self.probe = link, served, form, probe
        self._seen: tuple[Link | None, int] = (None, 0)  # the connections that an earlier check covers
        self._looked = time.monotonic()
        self._lock = threading.Lock()

    def see(self, found: Scored) -> None:
        """Look at the names in an answer."""
        if found.fingerprint != self.served.system_fingerprint:
            raise self._changed("system_fingerprint", str(self.served.system_fingerprint), str(found.fingerprint))
        if found.model is not None and found.model != self.served.model:
            raise self._changed("model", self.served.model, found.model)

    def confirm(self, workers: Link) -> None:
        """Require that the server behind the workers' connections is the one that was asked first."""
        now = workers, workers.connected
        is_new, is_old = now != self._seen, time.monotonic() - self._looked > EVERY
        if is_new or is_old:
            try:
                self.check()
            except EngineError as error:
                fix = error.fix if is_new else "the last minute's scores may be of either: score again with --fresh"
                raise EngineError(error.message, fix=fix) from None
            self._seen, self._looked = now, time.monotonic()

    def check(self) -> None:
        """Ask the server who it is and for the scores of the probe, and compare."""
        with self._lock:
            before = self.served
            try:
                now = replace(look(self.link, before.model), system_fingerprint=before.system_fingerprint)
            except ModelError as gone:
                raise EngineError(f"{gone.message} any more; {gone.fix}", fix=_FIX) from None
            for name, value in before.facts().items():
                if getattr(now, name) != value:
                    raise self._changed(name, str(value), str(getattr(now, name)))
            found = score(self.link, self.form, before.model, self.probe.ids)
            self.see(found)
            moved = distance(found.logprob, self.probe.scores)
            if not moved <= UNCHANGED:
                raise EngineError(
                    f"{self.link.root} gives other scores than before (by {moved:.2g} nats a token on a probe)",
                    fix=_FIX,
                )

    def _changed(self, what: str, before: str, now: str) -> EngineError:
        return EngineError(f"{self.link.root} changed: its {what} was {before[:200]} and is {now[:200]}", fix=_FIX)


_FIX = (
    "start the server as it was and run the same command again to resume; "
    "a run of the server as it is now begins with --fresh or in another --out"
)
