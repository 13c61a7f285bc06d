"""One model as several replicas: the arguments about them, and what the core asks of a wing that runs them.

A wing offers the class of its ``Replicas`` under the kind "replicas". If none does, these arguments do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from scoremode.core import extensions

if TYPE_CHECKING:
    from scoremode.core.engine.base import Engine, EngineFacts
    from scoremode.core.engine.plugin import Work
    from scoremode.core.engine.registry import ChosenEngine
    from scoremode.core.verbs.progress import Progress
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
    found: type[Replicas] = extensions.offered("replicas")[0]
    return found


def spread_names() -> tuple[str, ...]:
    """The names of the arguments about replicas; none if no wing runs replicas."""
    return SPREAD if extensions.offered("replicas") else ()


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


class Pool(Protocol):
    """Replicas that were opened for a study, of which at least one is ready."""

    about: Any  # see ``Worker``
    facts: EngineFacts

    def share(self, pieces: Pieces, done: Bools) -> Iterator[tuple[int, Any]]:
        """Yields all results that are not ``done``, with their indices, in any order."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of one worker."""

    def notes(self) -> list[str]:
        """What a reader of the results must know about the replicas."""

    def close(self) -> None: ...


class Replicas(Protocol):
    """A model that runs as several replicas. A wing offers its class under the kind "replicas"."""

    chosen: ChosenEngine  # with the options of one replica

    def __init__(self, chosen: ChosenEngine, spread: Spread, tokenizer: str | None) -> None:
        """Refuses an engine or resources that cannot work, before a text is read."""

    def engine(self, work: Work, progress: Progress | None) -> Engine:
        """Opens the replicas as one engine."""

    def pool(self, work: Work, open_worker: OpenWorker, progress: Progress | None) -> Pool:
        """Opens the replicas for a study, each with a worker of its own. The caller closes them."""

    @staticmethod
    def read(given: Mapping[str, Any]) -> Spread:
        """Reads arguments about replicas, at least one; refuses those that cannot work."""

    @staticmethod
    def require() -> None:
        """Refuses replicas if a package that they need is not installed."""
