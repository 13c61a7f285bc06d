"""One model as several replicas: the arguments about them, and the work that they share.

A wing offers the class that runs them. If none does, these arguments do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from scoremode.core.extensions import Replicas, ReplicasOffer, offered

if TYPE_CHECKING:
    from scoremode.core.engine.base import EngineFacts
    from scoremode.core.engine.plugin import Work
    from scoremode.core.engine.registry import ChosenEngine
    from scoremode.values import Bools, Ints

OTHER_FILES = "give every node the same files, versions and options"


class SpreadArguments(TypedDict, total=False):
    """The arguments about replicas, by name. None of them is part of a run's identity."""

    replicas: int | None
    """engines at a time (default: one, in this process)"""
    ray: str | None
    """auto, or HOST:PORT of a Ray cluster (default: Ray is started here)"""
    gpus_per_replica: float | None
    """GPUs of each, also a share (default: what it needs)"""
    cpus_per_replica: float | None
    """CPU cores of each (default: 1 for each process of the engine)"""


SPREAD = tuple(SpreadArguments.__annotations__)


@dataclass(frozen=True, slots=True)
class Spread:
    """The number of replicas, their cluster, and the resources of each."""

    replicas: int
    ray: str | None = None
    gpus_per_replica: float | None = None
    cpus_per_replica: float | None = None

    def given(self) -> Mapping[str, object]:
        return {name: value for name in SPREAD if (value := getattr(self, name)) is not None}


def replicas_class() -> type[Replicas]:
    """The class that runs replicas. Only where a ``Spread`` was read: then a wing offers one."""
    return offered(ReplicasOffer)[0].load()


def spread_names() -> tuple[str, ...]:
    """The names of the arguments about replicas; none if no wing runs replicas."""
    return SPREAD if offered(ReplicasOffer) else ()


def read_spread(given: Mapping[str, Any]) -> tuple[Spread | None, dict[str, Any]]:
    """Splits arguments by name into those of replicas (None: no replicas) and all others."""
    known = spread_names()
    said = {name: given[name] for name in known if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in known}
    return (replicas_class().read(said) if said else None), rest


# ── the seam ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Worker:
    """What a replica opened for its work. The function that opens it is sent to every replica."""

    methods: Any  # an object whose methods are called by name; ``close`` is the last
    facts: EngineFacts
    about: Any = None  # what else the driver must know of it


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
