"""The GPUs and CPUs of one replica."""

from __future__ import annotations

from dataclasses import dataclass

from scoremode.core.engine.options import Options
from scoremode.core.engine.plugin import EnginePlugin
from scoremode.core.verbs.replicas import Spread
from scoremode.errors import OptionError


@dataclass(frozen=True, slots=True)
class Room:
    """The GPUs and CPUs that one replica needs.

    >>> Room(ranks=2, gpus=1.0, cpus=1.0, over_nodes=False).words
    '2 GPUs and 2 CPUs'
    """

    ranks: int  # processes of its engine
    gpus: float  # per process
    cpus: float
    over_nodes: bool  # may its processes run on several nodes?

    @property
    def all_gpus(self) -> float:
        return self.gpus * self.ranks

    @property
    def all_cpus(self) -> float:
        return self.cpus * self.ranks

    @property
    def words(self) -> str:
        parts = [f"{n:g} {kind}{'' if n == 1 else 's'}" for n, kind in ((self.all_gpus, "GPU"), (self.all_cpus, "CPU"))]
        return " and ".join(part for part in parts if not part.startswith("0 ")) or "nothing"


def room_for(spread: Spread, plugin: EnginePlugin, options: Options) -> Room:
    """Returns the resources of one replica; refuses impossible ones before Ray is started."""
    place = plugin.placement(options)
    ranks = place.ranks
    own = (1.0 if place.on_gpus else 0.0) * ranks
    gpus = own if spread.gpus_per_replica is None else spread.gpus_per_replica
    if ranks > 1 and gpus not in (0.0, float(ranks)):
        raise OptionError(
            f"--gpus-per-replica {gpus:g} does not fit an engine of {ranks} processes",
            fix=f"give --gpus-per-replica {ranks}, or leave it out",
        )
    cpus = float(ranks) if spread.cpus_per_replica is None else spread.cpus_per_replica
    return Room(ranks, gpus / ranks, cpus / ranks, place.over_nodes)
