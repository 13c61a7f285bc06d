"""One model as several replicas: the arguments about them, and the work that they share.

A wing offers the class that runs them. If none does, these arguments do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scoremode.core.extensions import Replicas, ReplicasOffer, offered
from scoremode.core.options import KnownOption, option, options_of

if TYPE_CHECKING:
    from scoremode.core.engine.base import EngineFacts
    from scoremode.core.engine.plugin import Work
    from scoremode.core.engine.registry import ChosenEngine
    from scoremode.values import Bools, Ints

OTHER_FILES = "give every node the same files, versions and options"


@dataclass(frozen=True, slots=True)
class Spread:
    """The number of replicas, their cluster, and the resources of each. None of it is part of a run's identity."""

    replicas: int = option("engines at a time (default: one, in this process)", metavar="N")
    ray: str | None = option("auto, or HOST:PORT of a Ray cluster (default: Ray is started here)", metavar="ADDRESS")
    gpus_per_replica: float | None = option("GPUs of each, also a share (default: what it needs)", metavar="N")
    cpus_per_replica: float | None = option(
        "CPU cores of each (default: 1 for each process of the engine)", metavar="N"
    )

    @classmethod
    def options(cls) -> dict[str, KnownOption]:
        """Every field by its name."""
        return options_of(cls)


def replicas_class() -> type[Replicas]:
    """The class that runs replicas. Only where a ``Spread`` was read: then a wing offers one."""
    return offered(ReplicasOffer)[0].load()


def spread_options() -> Mapping[str, KnownOption]:
    """The options about replicas by name; none if no wing runs replicas."""
    return Spread.options() if offered(ReplicasOffer) else {}


def read_spread(arguments: Mapping[str, Any]) -> tuple[Spread | None, dict[str, Any]]:
    """Splits arguments by name into those of replicas (None: no replicas) and all others."""
    known = spread_options()
    of_spread = {name: arguments[name] for name in known if arguments.get(name) is not None}
    rest = {name: value for name, value in arguments.items() if name not in known}
    return (replicas_class().read(of_spread) if of_spread else None), rest


# ── the seam ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Worker:
    """What a replica opened for its work. The function that opens it is sent to every replica."""

    methods: Any  # an object whose methods are called by name; ``close`` is the last
    facts: EngineFacts
    about: Any = None  # other facts about the worker that the driver needs


OpenWorker = Callable[["ChosenEngine", "Work"], Worker]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work that replicas share. If a replica dies or fails, another one has its pieces."""

    unit: str  # what a result is called
    fix: str  # what the user can do if replicas die during this work
    method: str  # of the worker; a generator
    members: Sequence[Ints]  # the indices of the results of each piece
    arguments: Callable[[int, Bools], tuple[Any, ...]]  # the method's, from a piece's number and what is done
    read: Callable[[Any], Iterable[tuple[int, Any]]] = lambda said: (said,)  # ─▶ places in the piece, results
    ahead: int = 1  # pieces that a replica has at a time
