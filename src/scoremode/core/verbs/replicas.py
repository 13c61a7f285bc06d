"""One model as several replicas: the arguments about them, and what the core asks of a wing that runs them.

A wing offers the class of its ``Replicas`` under the kind "replicas". If none does, these arguments do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from scoremode.core import extensions
from scoremode.core.arguments import require_text, whole_number
from scoremode.errors import OptionError

if TYPE_CHECKING:
    from scoremode.core.engine.base import Engine, EngineFacts
    from scoremode.core.engine.options import Options
    from scoremode.core.engine.plugin import EnginePlugin, Work
    from scoremode.core.engine.registry import Chosen
    from scoremode.core.verbs.progress import Progress
    from scoremode.values import Bools, Ints

T = TypeVar("T")
MOST = 100_000  # replicas; a larger number is taken for a typing error
OTHER_FILES = "give every node the same files"  # the fix of an error that no second start would repair


class SpreadArguments(TypedDict, total=False):
    """The arguments about replicas, by name. None of them is part of a run's identity."""

    replicas: int | None  # engines that share the work; default: one, in this process
    ray: str | None  # auto, or the address of a Ray cluster; default: Ray is started on this machine
    gpus_per_replica: float | None  # default: as many as the engine needs
    cpus_per_replica: float | None  # default: 1 for each process of the engine


SPREAD = tuple(SpreadArguments.__annotations__)


@dataclass(frozen=True, slots=True)
class Spread:
    """The number of replicas, their cluster, and the resources of each."""

    replicas: int
    ray: str | None = None
    gpus_per_replica: float | None = None
    cpus_per_replica: float | None = None

    def given(self) -> dict[str, Any]:
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
    if not said:
        return None, rest
    count = whole_number("replicas", said.get("replicas"))
    address = said.get("ray")
    if count is None and address is None:
        flag = "--" + next(iter(said)).replace("_", "-")
        raise OptionError(f"{flag} is about replicas, and none are asked for", fix="give --replicas N as well")
    count = 1 if count is None else count
    if not 1 <= count <= MOST:
        fix = "give --replicas 2, or leave it out to score in this process"
        raise OptionError(f"--replicas {count} {'is too many' if count > 0 else 'leaves nobody to score'}", fix=fix)
    if address is not None:
        require_text("ray", address)
        if not address.strip() or any(c.isspace() for c in address):
            raise OptionError(f"--ray '{address}' is not an address", fix="give --ray auto, or --ray HOST:PORT")
    gpus = _amount("--gpus-per-replica", said.get("gpus_per_replica"), least=0.0)
    cpus = _amount("--cpus-per-replica", said.get("cpus_per_replica"), least=1e-3)
    return Spread(count, address, gpus, cpus), rest


def _amount(flag: str, value: Any, least: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{flag} {value} is not a number", fix=f"give a number, as in {flag} 1")
    if value < least:
        raise OptionError(f"{flag} {value:g} is too small", fix=f"give {flag} 0.25, or 1")
    if value > 1 and value != int(value):
        raise OptionError(f"{flag} {value:g} is neither a share of one nor a whole number", fix=f"give {flag} 1 or 2")
    return float(value)


# ── the seam ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Worker:
    """What a replica opened for its work. The function that opens it is sent to every replica."""

    methods: Any  # an object whose methods are called by name; ``close`` is the last
    facts: EngineFacts
    about: Any = None  # what else the driver must know of it


OpenWorker = Callable[["Chosen", "Work"], Worker]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work that replicas share. A replica has one piece at a time, and another has it if that one dies or fails."""

    unit: str  # what a result is called
    fix: str  # what helps if replicas die of it
    method: str  # of the worker; yields results, each with its place in the piece
    members: Sequence[Ints]  # the indices of the results of each piece
    arguments: Callable[[int, Bools], tuple[Any, ...]]  # of the method: for a piece, and with the results that exist


class Pool(Protocol):
    """Replicas that were opened for a study, of which at least one is ready."""

    about: Any  # see ``Worker``
    facts: EngineFacts

    def share(self, pieces: Pieces, done: Bools) -> Iterator[tuple[int, Any]]:
        """Yields all results that are not ``done``, with their indices, in any order."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of one worker."""

    def put(self, value: Any) -> Any:
        """Sends a value once, for many calls; returns what to give to them in its place."""

    def notes(self) -> list[str]:
        """What a reader of the results must know about the replicas."""

    def close(self) -> None: ...


class Replicas(Protocol):
    """A model that runs as several replicas. A wing offers its class under the kind "replicas"."""

    chosen: Chosen  # with the options of one replica

    def __init__(self, chosen: Chosen, spread: Spread, tokenizer: str | None) -> None:
        """Refuses an engine or resources that cannot work, before a text is read."""

    def engine(self, work: Work, progress: Progress | None) -> Engine:
        """Opens the replicas as one engine."""

    def pool(self, work: Work, open_worker: OpenWorker, progress: Progress | None) -> Pool:
        """Opens the replicas for a study, each with a worker of its own. The caller closes them."""

    @staticmethod
    def require() -> None:
        """Refuses replicas if a package that they need is not installed."""

    @staticmethod
    def side_by_side(
        spread: Spread,
        engines: Mapping[str, tuple[EnginePlugin, Options]],
        score: Callable[[str, int, Progress], T],
        progress: Progress | None,
    ) -> dict[str, T]:
        """Scores candidates by name, several at a time; ``score`` gets a name and how many replicas it may have."""
