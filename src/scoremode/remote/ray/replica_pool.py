"""Gives work to the replicas of one model, starts others for those that die, and notes what happened. In the driver."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.replicas import Pieces, Spread
from scoremode.errors import EngineError, ScoremodeError
from scoremode.remote.ray.ray_cluster import Cluster, ClusterRoom, reason_of
from scoremode.remote.ray.replica import FinishedPiece, Opened, Replica, ReplicaSpec
from scoremode.values import Bools

logger = logging.getLogger(__name__)

AHEAD = 8  # items of a replica's stream that may wait to be read
MOST_DEATHS = 3  # of replicas over one piece, or of one while it opens its worker
NO_ROOM_SECONDS = 15.0  # how long a cluster may lack room for a single replica; a lost node may come back
CLOSE_SECONDS = 5.0  # how long engines may take to end the processes that they started
SHOW_SECONDS = 0.25  # between two updates of the progress line
RESUME = "what was scored is kept: run the same command again to resume"


@dataclass(eq=False)
class ReplicaHandle:
    """The driver's view of one replica. If it dies, another actor takes its place."""

    name: str
    actor: Any = None
    opening: Any = None  # the reference of what ``open`` will return
    opened: Opened | None = None
    failures: int = 0  # of its process, in a row, while it opened its worker
    sent: deque[tuple[int, Any]] = field(default_factory=deque)  # numbers of pieces, with the streams of their results
    is_left_out: bool = False
    host: str = ""  # of the last actor that was open
    device: str = ""

    @property
    def call(self) -> Any:
        """The reference or the stream of what it will say next; None if it was asked nothing."""
        return self.sent[0][1] if self.sent else self.opening

    def send(self, number: int, method: str, *arguments: Any) -> None:
        """Calls a method of its worker, which streams results, then ``FinishedPiece`` or an error."""
        call = self.actor.stream.options(num_returns="streaming", _generator_backpressure_num_objects=AHEAD)
        self.sent.append((number, call.remote(method, *arguments)))


class Shared:
    """Work that replicas share: waiting and finished pieces. No result depends on which replica does what."""

    def __init__(self, pieces: Pieces, done: Bools) -> None:
        self.pieces, self.done = pieces, done.copy()
        self.waiting = deque(n for n, members in enumerate(pieces.members) if not done[members].all())
        self.losses: Counter[int] = Counter()  # replicas that died over each piece

    def missing(self, number: int) -> list[int]:
        return [int(index) for index in self.pieces.members[number] if not self.done[index]]

    def put_back(self, numbers: list[int], why: str) -> int:
        """Lets the pieces of a replica that died wait again; returns how many results they lack."""
        for number in numbers[:1]:  # the one that it worked on
            self.losses[number] += 1
            missing = self.missing(number)
            if missing and self.losses[number] >= MOST_DEATHS:
                raise EngineError(
                    f"three replicas died over {self.pieces.unit}s {missing[0]} to {missing[-1]} ({why})",
                    fix=f"{self.pieces.fix}; {RESUME}",
                )
        self.waiting.extendleft(reversed(numbers))
        return sum(len(self.missing(number)) for number in numbers)


def environment_of(spread: Spread) -> dict[str, str]:
    """Returns the variable for as many threads per replica as here: the bits of a CPU's sums depend on the number."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if not threads and spread.cpus_per_replica is not None and spread.cpus_per_replica >= 1:
        threads = str(int(spread.cpus_per_replica))
    elif not threads and "torch" in sys.modules:
        threads = str(sys.modules["torch"].get_num_threads())
    return {"OMP_NUM_THREADS": threads} if threads else {}


class ReplicaPool:
    """The replicas of a model. It is open as soon as one replica is ready; the others join later."""

    def __init__(self, spec: ReplicaSpec, room: ClusterRoom, spread: Spread, progress: Progress | None) -> None:
        self.room, self._spec, self._environment = room, spec, environment_of(spread)
        self.replicas = [ReplicaHandle(f"replica {number + 1}") for number in range(spread.replicas)]
        self.show: Callable[[str], None] | None = getattr(progress, "detail", None)  # gets the number of ready replicas
        self.say: Callable[[str], None] = getattr(progress, "say", None) or logger.warning
        self._shown = 0.0  # when ``show`` was last called
        self.counts: Counter[str] = Counter()  # of deaths, and of results that others had to give
        self.left_out = list[str]()  # a line for each
        self.unit = "window"  # what the replicas give
        self._refusal: ScoremodeError | None = None  # of the first replica that could not open its worker
        self._idle_since = time.monotonic()  # since when no replica is ready
        self.cluster = Cluster(spread, room)
        self._ray = self.cluster.ray
        try:
            self._require_room(0)
            for replica in self.replicas:
                self._start(replica)
            opened = self.wait_for_one().opened
        except BaseException:
            self.close()
            raise
        assert opened is not None
        self.facts, self.about = opened.facts, opened.about

    def _start(self, replica: ReplicaHandle) -> None:
        """Starts an actor, wherever there is room, or as soon as there is."""
        needs = {"num_cpus": self.room.cpus, "num_gpus": self.room.gpus, "runtime_env": {"env_vars": self._environment}}
        replica.actor = self._ray.remote(Replica).options(**needs).remote(self._spec)
        replica.opened, replica.opening = None, replica.actor.open.remote()
        replica.sent.clear()

    @property
    def ready(self) -> list[ReplicaHandle]:
        return [replica for replica in self.replicas if replica.opened is not None]

    @property
    def sharers(self) -> int:
        """The number of replicas that share the work, including those that are starting."""
        return sum(not replica.is_left_out for replica in self.replicas)

    def wait_for_one(self) -> ReplicaHandle:
        """Waits until a replica is ready. Returns the ready replica with the fewest pieces."""
        while not self.ready:
            for replica, message in self._poll():
                self._lost(None, replica, message)
        return min(self.ready, key=lambda replica: len(replica.sent))

    def wait_for_all(self, seconds: float) -> int:
        """Waits until all replicas are ready or left out, at most ``seconds``. Returns how many are ready."""
        until = time.monotonic() + seconds
        while any(replica.opening is not None for replica in self.replicas) and time.monotonic() < until:
            for replica, message in self._poll():
                self._lost(None, replica, message)
        return len(self.ready)

    def _poll(self) -> Iterator[tuple[ReplicaHandle, Any]]:
        """Yields what replicas have said since the last poll: items of streams, or the error of one that died."""
        self._require_room(NO_ROOM_SECONDS)
        if self.show is not None and time.monotonic() - self._shown >= SHOW_SECONDS:
            self._shown = time.monotonic()
            self.show(f"{len(self.ready)}/{len(self.replicas)} replicas")
        replicas_by_call = {replica.call: replica for replica in self.replicas if replica.call is not None}
        if not replicas_by_call:
            return
        self._ray.wait(list(replicas_by_call), num_returns=1, timeout=0.25)
        answered, _ = self._ray.wait(list(replicas_by_call), num_returns=len(replicas_by_call), timeout=0)
        for call in answered:
            replica = replicas_by_call[call]
            try:
                message = self._ray.get(call if replica.opening is not None else next(call))
            except StopIteration:
                message = EngineError("its answers ended before they were complete", fix="run it again")
            except self._ray.exceptions.RayError as error:
                message = error
            if isinstance(message, Opened):
                replica.opening, replica.opened, replica.failures = None, message, 0
                replica.host, replica.device = message.host, message.facts.device
            else:
                yield replica, message

    def _require_room(self, seconds: float) -> None:
        """Raises an error if no replica is ready for so long, and no node of the cluster could hold one."""
        now = time.monotonic()
        if self.ready:
            self._idle_since = now
        elif now - self._idle_since >= seconds and not self.cluster.fitting(self.room):
            raise EngineError(
                f"a replica needs {self.room.words} on one node; the cluster has {self.cluster.offers()}",
                fix="give fewer --gpus-per-replica or --cpus-per-replica, or a larger cluster",
            )

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def share(self, pieces: Pieces, done: Bools) -> Iterator[tuple[int, Any]]:
        """Yields all results that are not ``done``, with their indices, in any order."""
        self.unit, work = pieces.unit, Shared(pieces, done)
        try:
            while work.waiting or any(replica.sent for replica in self.replicas):
                for replica in self.ready:
                    self._send(work, replica)
                for replica, message in self._poll():
                    yield from self._handle(work, replica, message)
                    self._send(work, replica)  # before others are handled, because this replica may be idle
        finally:
            for replica in self.replicas:  # nobody reads what they still say; they finish their current piece
                replica.sent.clear()

    def _send(self, work: Shared, replica: ReplicaHandle) -> None:
        while replica.opened is not None and work.waiting and len(replica.sent) < work.pieces.ahead:
            number = work.waiting.popleft()
            if work.missing(number):
                replica.send(number, work.pieces.method, *work.pieces.arguments(number, work.done))

    def _handle(self, work: Shared, replica: ReplicaHandle, message: Any) -> Iterator[tuple[int, Any]]:
        if isinstance(message, Exception):
            self._lost(work, replica, message)
        elif isinstance(message, FinishedPiece):
            number, _ = replica.sent.popleft()
            if missing := work.missing(number):
                raise EngineError(
                    f"the engine left {work.pieces.unit} {missing[0]} without an answer", fix="run it again"
                )
        else:
            members = work.pieces.members[replica.sent[0][0]]
            for place, result in work.pieces.read(message):
                index = int(members[place])
                if not work.done[index]:
                    work.done[index] = True
                    yield index, result

    def _lost(self, work: Shared | None, replica: ReplicaHandle, error: Exception) -> None:
        """Gives the pieces of a replica that died to others, and starts another one. An engine's error is raised."""
        if replica.opening is not None:
            replica.failures += 1
            if isinstance(error, ScoremodeError) or replica.failures >= MOST_DEATHS:
                self._leave_out(replica, error)
            else:
                self._start(replica)  # perhaps a node was lost
            return
        numbers = [number for number, _ in replica.sent]
        is_known = work is None or not numbers or work.losses[numbers[0]] > 0
        if isinstance(error, ScoremodeError) and (is_known or not isinstance(error, EngineError)):
            raise error  # a second replica has it too: it is the model's
        why = str(error) if isinstance(error, ScoremodeError) else reason_of(error)
        again = 0 if work is None else work.put_back(numbers, why)
        if isinstance(error, ScoremodeError):
            self._end(replica)
        self.counts["deaths"] += 1
        self.counts["again"] += again
        if again:
            self.say(f"{replica.name} is gone ({why}); {again} {self.unit}s go to others")
        self._idle_since = time.monotonic()
        self._start(replica)

    def _leave_out(self, replica: ReplicaHandle, error: Exception) -> None:
        """Ends a replica that cannot open its worker. Raises the first such error if no replica is left."""
        why = str(error) if isinstance(error, ScoremodeError) else reason_of(error)
        if isinstance(error, ScoremodeError):
            self._refusal = self._refusal or error
        replica.is_left_out = True
        self._end(replica)
        self.left_out.append(f"{replica.name} is left out: {why}")
        if not self.sharers:
            raise self._refusal or EngineError(f"no replica could open the model ({why})", fix=RESUME)
        self.say(self.left_out[-1])

    # ── questions to one replica ─────────────────────────────────────────────────────────────────────────────────────
    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of one replica, or of another if that one dies. Raises an error that the engine returns."""
        why = ""
        for _ in range(MOST_DEATHS):
            replica = self.wait_for_one()
            try:
                answer = self._ray.get(replica.actor.call.remote(method, *arguments))
            except self._ray.exceptions.RayError as error:
                why = reason_of(error)
                self._lost(None, replica, error)
                continue
            if isinstance(answer, ScoremodeError):
                raise answer
            return answer
        raise EngineError(f"three replicas died over one question ({why})", fix=RESUME)

    def _end(self, replica: ReplicaHandle) -> None:
        replica.opening = replica.opened = None
        replica.sent.clear()
        self._ray.kill(replica.actor)

    def close(self) -> None:
        """Closes the workers of all replicas, then ends the replicas, and Ray if it was started for them."""
        try:
            if self._ray.is_initialized():
                ending = [replica.actor.close.remote() for replica in self.ready]
                if ending:
                    self._ray.wait(ending, num_returns=len(ending), timeout=CLOSE_SECONDS)
                for replica in self.replicas:
                    if replica.actor is not None and not replica.is_left_out:
                        self._end(replica)
        finally:
            self.replicas = []
            self.cluster.close()

    # ── what a reader of the numbers should know ─────────────────────────────────────────────────────────────────────
    def new_question(self) -> None:
        """Forgets what the replicas did for the last question, but not where they are."""
        self.counts.clear()

    def _started(self, name: str) -> Counter[str]:
        """The hosts or the devices of the replicas that started."""
        return Counter(getattr(replica, name) for replica in self.replicas if replica.host)

    def as_json(self) -> dict[str, Any]:
        hosts = self._started("host")
        return {
            "wanted": len(self.replicas),
            "started": hosts.total(),
            "nodes": dict(hosts),
            "devices": dict(self._started("device")),
            "cluster": self.cluster.address or "local",
            "deaths": self.counts["deaths"],
            "left_out": self.left_out,
            "windows_again": self.counts["again"],
        }

    def notes(self) -> list[str]:
        """What happened in a few lines, for tables and reports."""
        hosts, devices = self._started("host"), self._started("device")
        unlike = f"; their devices differ: {', '.join(sorted(devices))}" if len(devices) > 1 else ""
        notes = [f"scored by {_many(hosts.total(), 'replica')} on {_many(len(hosts), 'node')}{unlike}"]
        if self.counts["deaths"]:
            again = _many(self.counts["again"], self.unit)
            notes.append(f"{_many(self.counts['deaths'], 'replica')} died; {again} went to others")
        return notes + self.left_out


def _many(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
