"""Replicas on Ray, as the core asks for them, and the arguments about them.

Every command line reads this file: it imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scoremode.core.installation import pip_install
from scoremode.core.verbs.replicas import OpenWorker, Spread
from scoremode.errors import OptionError
from scoremode.remote.ray.ray_cluster import ClusterRoom

if TYPE_CHECKING:
    from scoremode.core.engine.options import Options
    from scoremode.core.engine.plugin import EnginePlugin, Work
    from scoremode.core.engine.registry import ChosenEngine
    from scoremode.core.verbs.progress import Progress
    from scoremode.remote.ray.engine import ReplicatedEngine
    from scoremode.remote.ray.replica_pool import ReplicaPool

MOST = 100_000  # replicas; a larger number is taken for a typing error


def room_for(spread: Spread, plugin: EnginePlugin, options: Options) -> ClusterRoom:
    """Returns the resources of one replica; refuses impossible ones before Ray is started."""
    place = plugin.placement(options)
    if place.over_nodes:
        raise OptionError(
            "a replica has all its processes on one node, and Ray's executor puts them on several",
            fix="leave --engine-arg distributed_executor_backend=ray out, or --replicas",
        )
    ranks = place.ranks
    default_gpus = (1.0 if place.on_gpus else 0.0) * ranks
    gpus = default_gpus if spread.gpus_per_replica is None else spread.gpus_per_replica
    if ranks > 1 and gpus not in (0.0, float(ranks)):
        raise OptionError(
            f"--gpus-per-replica {gpus:g} does not fit an engine of {ranks} processes",
            fix=f"give --gpus-per-replica {ranks}, or leave it out",
        )
    cpus = float(ranks) if spread.cpus_per_replica is None else spread.cpus_per_replica
    return ClusterRoom(gpus, cpus)


def read_spread(arguments: Mapping[str, Any]) -> Spread:
    """Reads arguments about replicas, at least one; refuses those that cannot work."""
    count, address = arguments.get("replicas"), arguments.get("ray")
    if count is None and address is None:
        flag = "--" + next(iter(arguments)).replace("_", "-")
        raise OptionError(f"{flag} is about replicas, and none are asked for", fix="give --replicas N as well")
    count = 1 if count is None else count
    if not 1 <= count <= MOST:
        fix = "give --replicas 2, or leave it out to score in this process"
        raise OptionError(f"--replicas {count} {'is too many' if count > 0 else 'leaves nobody to score'}", fix=fix)
    if address is not None and (not address.strip() or any(c.isspace() for c in address)):
        raise OptionError(f"--ray '{address}' is not an address", fix="give --ray auto, or --ray HOST:PORT")
    gpus = _amount("--gpus-per-replica", arguments.get("gpus_per_replica"), least=0.0)
    cpus = _amount("--cpus-per-replica", arguments.get("cpus_per_replica"), least=1e-3)
    return Spread(count, address, gpus, cpus)


def _amount(flag: str, value: float | None, least: float) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise OptionError(f"{flag} {value} is not a number", fix=f"give a number, as in {flag} 1")
    if value < least:
        raise OptionError(f"{flag} {value:g} is too small", fix=f"give {flag} 0.25, or 1")
    if value > 1 and value != int(value):
        raise OptionError(f"{flag} {value:g} is neither a share of one nor a whole number", fix=f"give {flag} 1 or 2")
    return float(value)


class RayReplicas:
    """A model that runs as several replicas on Ray: see ``core.verbs.replicas.Replicas``."""

    def __init__(self, chosen: ChosenEngine, spread: Spread, tokenizer: str | None) -> None:
        if not chosen.plugin.able().replicas:
            raise OptionError(f"the {chosen.plugin.name} engine cannot run as replicas", fix="leave --replicas out")
        self.require()
        room_for(spread, chosen.plugin, chosen.options)
        replica_options = chosen.plugin.placement(chosen.options).replica_options
        self.chosen = replace(chosen, options=replica_options or chosen.options)
        self._spread, self._tokenizer = spread, tokenizer

    def engine(self, work: Work, progress: Progress | None) -> ReplicatedEngine:
        from scoremode.remote.ray.engine import ReplicatedEngine
        from scoremode.remote.ray.replica import open_scoring

        return ReplicatedEngine(self.pool(work, open_scoring, progress))

    def pool(self, work: Work, open_worker: OpenWorker, progress: Progress | None) -> ReplicaPool:
        from scoremode.remote.ray.replica import ReplicaSpec, facts_of
        from scoremode.remote.ray.replica_pool import ReplicaPool

        name, plugin, options = self.chosen.subject.name, self.chosen.plugin, self.chosen.options
        facts, folder = facts_of(self.chosen), os.getcwd()
        spec = ReplicaSpec(
            name, plugin.address or plugin.name, options.given(), self._tokenizer, work, folder, facts, open_worker
        )
        return ReplicaPool(spec, room_for(self._spread, plugin, options), self._spread, progress)

    read = staticmethod(read_spread)

    @staticmethod
    def require() -> None:
        if importlib.util.find_spec("ray") is None:
            raise OptionError("--replicas and --ray need Ray, which is not installed", fix=pip_install("ray"))
