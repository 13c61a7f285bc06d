"""Ray itself: start it on this machine or join a cluster, quietly; how much room there is."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from scoremode.cluster import guard, ray_token
from scoremode.cluster.spread import Room, Spread
from scoremode.errors import EngineError, OptionError

INSTALL = "pip install '.[ray]'"
PATIENCE = 3.0  # seconds to reach an address
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_COLOR_PREFIX": "0"}


def require_ray() -> None:
    """Refuse at once where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise OptionError("--replicas and --ray need Ray, which is not installed", fix=INSTALL)


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:  # half installed, or for another Python
        raise OptionError(f"Ray is installed but cannot be imported ({error})", fix=INSTALL) from None
    return ray


class Cluster:
    """A connection to Ray. What was started here is stopped when it is closed."""

    def __init__(self, spread: Spread, room: Room) -> None:
        require_ray()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        self.ray: Any = _imported()
        self._folder: str | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._auth = ray_token.settings()
        self._is_ours = not self.ray.is_initialized()
        self.address = spread.ray or os.environ.get("RAY_ADDRESS") or None
        if self._is_ours:
            with _own_signals():
                self._connect(spread, room)

    def _connect(self, spread: Spread, room: Room) -> None:
        shared: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        _silence()
        if self.address is None:
            cpus = max(os.cpu_count() or 1, round(spread.replicas * room.all_cpus + 0.5))
            self._folder = tempfile.mkdtemp(prefix="scoremode-ray-")
            ray_token.give_one()
            shared |= {"address": "local", "include_dashboard": False, "num_cpus": cpus, "_temp_dir": self._folder}
        else:
            _require_answer(self.address)
            shared["address"] = self.address
        before = set(guard.descendants(os.getpid()))
        try:
            self.ray.init(**shared)
        except Exception as error:
            self.close()
            raise self._explained(error) from None
        if self._folder is not None:
            self._guard = guard.start(self._folder, before)

    def _explained(self, error: Exception) -> EngineError:
        why = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        if self.address is None:
            return EngineError(f"Ray did not start on this machine ({why})", fix="see that nothing limits its ports")
        if "version" in why.lower():
            return EngineError(
                f"the Ray cluster at {self.address} is of another version ({why})", fix="use its version"
            )
        fix = "start one with ray start --head, or leave --ray out to start Ray on this machine"
        return EngineError(f"there is no Ray cluster at {self.address} ({why})", fix=fix)

    def fitting(self, room: Room) -> int:
        """How many replicas the nodes of the cluster could hold if nothing else were on them."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if room.over_nodes:
            ranks = sum(_times(node, room.gpus, room.cpus) for node in nodes)
            return ranks // room.ranks
        return sum(_times(node, room.all_gpus, room.all_cpus) for node in nodes)

    def offers(self) -> str:
        """What the nodes of the cluster have, in words."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        gpus, cpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("GPU", "CPU"))
        count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        return f"{count} with {gpus:g} GPU{'' if gpus == 1 else 's'} and {cpus:g} CPU{'' if cpus == 1 else 's'}"

    def is_alive(self, node: str) -> bool:
        return any(found["NodeID"] == node and found["Alive"] for found in self.ray.nodes())

    def close(self) -> None:
        """Leave the cluster; stop Ray if it was started here."""
        if self._is_ours and self.ray.is_initialized():
            with _own_signals():
                self.ray.shutdown()
        if self._is_ours:
            ray_token.put_back(self._auth)
        watching, self._guard = self._guard, None
        if watching is not None:
            guard.stop(watching)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _times(node: dict[str, float], gpus: float, cpus: float) -> int:
    fits = [node.get(kind, 0.0) / amount for kind, amount in (("GPU", gpus), ("CPU", cpus)) if amount > 0]
    return int(min(fits) + 1e-9) if fits else 1


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM; ours says what is kept and how to resume."""
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


def _silence() -> None:
    """A replica that dies is reported by us, in one line; Ray's own words about it would be ten."""
    worker = sys.modules.get("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None  # type: ignore[union-attr]


def _require_answer(address: str) -> None:
    """Refuse an address where nobody listens within seconds; Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        raise OptionError(
            f"--ray {address} is an address of Ray's client, which does not stream results",
            fix="run scoremode on a node of the cluster with --ray auto, or give --ray HOST:6379",
        )
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise OptionError(f"--ray {address} is not HOST:PORT", fix="give --ray auto, or --ray HOST:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        fix = "start one with ray start --head, or leave --ray out to start Ray on this machine"
        raise EngineError(f"there is no Ray cluster at {address} ({why})", fix=fix) from None
