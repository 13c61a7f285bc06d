"""Work in pieces, and the driver's view of a replica that has some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from scoremode.core.verbs.replicas import Pieces
from scoremode.remote.ray.replica import Opened
from scoremode.remote.ray.replica_log import ReplicaStats
from scoremode.values import Bools, Ints

AHEAD = 8  # items of a replica's stream that may wait to be read


@dataclass(eq=False)
class Piece:
    """Batches, texts or swaps that one replica has at a time, and another one if that one dies or fails."""

    numbers: Sequence[int]
    deaths: int = 0  # of replicas that worked on it
    failures: int = 0  # of engines
    windows: Ints | None = None  # of its batches, as they were sent


@dataclass(eq=False)
class ReplicaHandle:
    """The driver's view of one replica. Each restart gives the replica a new actor."""

    stats: ReplicaStats
    actor: Any = None
    placement_group: Any = None  # set if its processes may be on several nodes
    calls: dict[str, Any] = field(default_factory=dict)  # method of the actor ─▶ the reference of its result
    opened: Opened | None = None
    is_probed: bool = False
    sent: deque[tuple[Piece, Any]] = field(default_factory=deque)  # with the streams of what it says
    failures: int = 0  # in a row
    not_before: float = 0.0  # when it may be started again
    is_left_out: bool = False

    def stream(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of its worker; returns what it yields, as a stream that ends with ``Finished`` or an error."""
        call = self.actor.stream.options(num_returns="streaming", _generator_backpressure_num_objects=AHEAD)
        return call.remote(method, *arguments, **named)

    @property
    def name(self) -> str:
        return self.stats.name

    @property
    def is_ready(self) -> bool:
        return self.opened is not None


class Piecework(ABC):
    """Results that replicas give, in pieces. Which replica has which piece, and when, changes no result."""

    unit: str  # what a result is called
    fix: str  # what helps if replicas die of it
    depth: ClassVar[int] = 1  # pieces that a replica has at a time

    def __init__(self, pieces: Iterable[Piece], done: Bools) -> None:
        self.waiting = deque(pieces)
        self.done: Bools = done.copy()  # for each result: is it there?

    @abstractmethod
    def members(self, number: int) -> Ints:
        """Returns the results that belong to a number of a piece."""

    @abstractmethod
    def send(self, replica: ReplicaHandle, piece: Piece) -> Any:
        """Sends a piece; returns the stream of what the replica says, which ends with ``Finished`` or an error."""

    @abstractmethod
    def accept(self, replica: ReplicaHandle, piece: Piece, said: Any) -> Iterator[Any]:
        """Yields the results in what a replica said, and notes that they are there."""

    def unfinished(self, piece: Piece) -> list[int]:
        return [number for number in piece.numbers if not self.done[self.members(number)].all()]

    def missing(self, piece: Piece) -> list[int]:
        return [index for n in piece.numbers for index in self.members(n).tolist() if not self.done[index]]


class StudyWork(Piecework):
    def __init__(self, pieces: Pieces, done: Bools) -> None:
        missing = [number for number, members in enumerate(pieces.members) if not done[members].all()]
        super().__init__([Piece([number]) for number in missing], done)
        self.pieces, self.unit, self.fix = pieces, pieces.unit, pieces.fix

    def members(self, number: int) -> Ints:
        return self.pieces.members[number]

    def send(self, replica: ReplicaHandle, piece: Piece) -> Any:
        return replica.stream(self.pieces.method, *self.pieces.arguments(piece.numbers[0], self.done))

    def accept(self, replica: ReplicaHandle, piece: Piece, said: tuple[int, Any]) -> Iterator[tuple[int, Any]]:
        place, result = said
        index = int(self.members(piece.numbers[0])[place])
        if not self.done[index]:
            self.done[index] = True
            yield index, result
