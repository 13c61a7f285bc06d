"""Ray itself: started on this machine or joined, without its output; its nodes, its token, and its errors in words."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scoremode.core.installation import pip_install
from scoremode.core.verbs.replicas import Spread
from scoremode.errors import EngineError, OptionError, one_line

START = "start one with ray start --head, or leave --ray out to start Ray on this machine"
CONNECT_SECONDS = 3.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_COLOR_PREFIX": "0"}
TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True)
class ClusterRoom:
    """The GPUs and CPUs that one replica needs, all on one node.

    >>> ClusterRoom(gpus=2.0, cpus=1.0).words
    '2 GPUs and 1 CPU'
    """

    gpus: float
    cpus: float

    @property
    def words(self) -> str:
        parts = [f"{n:g} {kind}{'' if n == 1 else 's'}" for n, kind in ((self.gpus, "GPU"), (self.cpus, "CPU"))]
        return " and ".join(part for part in parts if not part.startswith("0 ")) or "nothing"


class Cluster:
    """A connection to Ray. A Ray that was started here is stopped when the connection is closed."""

    def __init__(self, spread: Spread, room: ClusterRoom) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:  # half installed, or for another Python
            raise OptionError(f"Ray is installed but cannot be imported ({error})", fix=pip_install("ray")) from None
        self.ray: Any = ray
        self._folder: str | None = None
        self._token_before = _token_settings()
        self._is_ours = not self.ray.is_initialized()
        self.address = spread.ray or os.environ.get("RAY_ADDRESS") or None
        if self._is_ours:
            with own_signals():
                self._connect(spread, room)

    def _connect(self, spread: Spread, room: ClusterRoom) -> None:
        shared: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        silence()
        if self.address is None:
            cpus = max(os.cpu_count() or 1, round(spread.replicas * room.cpus + 0.5))
            self._folder = tempfile.mkdtemp(prefix="scoremode-ray-")
            if not any(self._token_before.values()):  # the user has no settings of their own
                _set_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
            shared |= {"address": "local", "include_dashboard": False, "num_cpus": cpus, "_temp_dir": self._folder}
        else:
            _require_answer(self.address)
            shared["address"] = self.address
        try:
            self.ray.init(**shared)
        except Exception as error:
            self.close()
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> EngineError:
        why = one_line(str(error))[:200] or type(error).__name__
        if self.address is None:
            return EngineError(f"Ray did not start on this machine ({why})", fix="see that nothing limits its ports")
        return EngineError(f"there is no Ray cluster of this version of Ray at {self.address} ({why})", fix=START)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def fitting(self, room: ClusterRoom) -> int:
        """How many replicas the nodes of the cluster could hold if nothing else ran on them."""
        wanted = [(kind, n) for kind, n in (("GPU", room.gpus), ("CPU", room.cpus)) if n > 0]
        fits = [[int(node.get(kind, 0.0) / n + 1e-9) for kind, n in wanted] for node in self._nodes()]
        return sum(min(times, default=1) for times in fits)

    def offers(self) -> str:
        """The resources of all nodes, in words."""
        nodes = self._nodes()
        gpus, cpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("GPU", "CPU"))
        count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        return f"{count} with {gpus:g} GPU{'' if gpus == 1 else 's'} and {cpus:g} CPU{'' if cpus == 1 else 's'}"

    def close(self) -> None:
        """Leaves the cluster; stops Ray if it was started here."""
        if self._is_ours and self.ray.is_initialized():
            with own_signals():
                self.ray.shutdown()
        if self._is_ours and _token_settings() != self._token_before:
            _set_token(self._token_before)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


# ── the token, without which strangers on the network could run code in a cluster ────────────────────────────────────
# Ray writes the token of a cluster of its own into the home folder, and from then on uses it for every cluster. One
# that was started before, without a token, then loses each replica at once. So a Ray of ours has its token in the
# environment alone, and the settings of one cluster are removed before the next.
def _token_settings() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in TOKEN_SETTINGS}


def _set_token(settings: dict[str, str] | dict[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with contextlib.suppress(ImportError, AttributeError):  # Ray caches these settings in C++ when they are first used
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Restores our signal handlers after the block: Ray replaces the one of SIGTERM, which says how to resume."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def silence() -> None:
    """Suppresses Ray's ten lines about a worker that died: our one line says the same."""
    worker = sys.modules.get("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None  # type: ignore[union-attr]


def _require_answer(address: str) -> None:
    """Refuses an address that does not answer within seconds; Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise OptionError(f"--ray {address} is not HOST:PORT", fix="give --ray auto, or --ray HOST:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        raise EngineError(f"there is no Ray cluster at {address} ({why})", fix=START) from None


def reason_of(error: Exception) -> str:
    """Why a replica died: a short form of Ray's long message."""
    text = one_line(str(error))
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" and "all references to the actor" in text:
        return "the cluster was started without Ray's token, and this process uses one: set RAY_AUTH_MODE=disabled"
    if "OutOfMemory" in type(error).__name__ or "memory pressure" in text:
        return "it was killed because the node's memory was used up"
    return "its process or its node is gone"
