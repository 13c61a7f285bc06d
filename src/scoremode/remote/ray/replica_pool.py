"""Gives work to the replicas of one model. Ray restarts those that die. This code runs in the driver."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.replicas import Pieces, Spread
from scoremode.errors import EngineError, InputError, ScoremodeError
from scoremode.remote.ray.ray_cluster import Cluster, reason_of
from scoremode.remote.ray.replica import Finished, Opened, Replica, ReplicaSpec
from scoremode.remote.ray.replica_log import ReplicaLog, ReplicaStats
from scoremode.remote.ray.room import ClusterRoom
from scoremode.values import Bools

AHEAD = 8  # items of a replica's stream that may wait to be read
MOST_STARTS = 3  # of a process that dies before its worker is open
MOST_DEATHS = 3  # of replicas over one piece
NO_ROOM_SECONDS = 15.0  # how long a cluster may lack room for a single replica; a lost node may come back
WAITING_SECONDS = 30.0  # after this time, the user is told what the pool waits for
CLOSE_SECONDS = 5.0  # how long engines may take to end the processes that they started
SHOW_SECONDS = 0.25  # between two updates of the progress line
PROBE = -1  # instead of a piece's number
RESUME = "what was scored is kept: run the same command again to resume"


@dataclass(eq=False)
class ReplicaHandle:
    """The driver's view of one replica."""

    stats: ReplicaStats
    actor: Any
    opening: Any = None  # the reference of what ``is_up`` or ``open`` will return
    is_up: bool = False  # does its process run?
    failures: int = 0  # of its process, in a row, while it opened its worker
    opened: Opened | None = None
    is_probed: bool = False
    sent: deque[tuple[int, Any]] = field(default_factory=deque)  # numbers of pieces, with the streams of their results
    is_left_out: bool = False

    @property
    def call(self) -> Any:
        """The reference or the stream of what it will say next; None if it was asked nothing."""
        return self.sent[0][1] if self.sent else self.opening

    def open(self) -> None:
        """Waits for the process, however long Ray needs to start it; its worker is opened then."""
        self.opened, self.is_probed, self.is_up = None, False, False
        self.sent.clear()
        self.opening = self.actor.is_up.options(max_task_retries=-1).remote()

    def send(self, number: int, method: str, *arguments: Any) -> None:
        """Calls a method of its worker, which yields results as a stream that ends with ``Finished`` or an error."""
        call = self.actor.stream.options(num_returns="streaming", _generator_backpressure_num_objects=AHEAD)
        self.sent.append((number, call.remote(method, *arguments)))


class Shared:
    """Work that replicas share: waiting and finished pieces. No result depends on which replica does what."""

    def __init__(self, pieces: Pieces, done: Bools) -> None:
        self.pieces, self.done = pieces, done.copy()
        self.waiting = deque(n for n, members in enumerate(pieces.members) if not done[members].all())
        self.losses: Counter[int] = Counter()  # replicas that died or failed over each piece

    def missing(self, number: int) -> list[int]:
        return [int(index) for index in self.pieces.members[number] if not self.done[index]]

    def put_back(self, numbers: list[int], error: Exception, why: str) -> int:
        """Lets the pieces of a replica wait again; returns how many results they lack. Some errors end the work."""
        if not numbers:
            return 0
        unit, first = self.pieces.unit, numbers[0]
        self.losses[first] += 1
        if isinstance(error, ScoremodeError) and (isinstance(error, InputError) or self.losses[first] > 1):
            raise error
        missing = self.missing(first)
        if missing and self.losses[first] >= MOST_DEATHS:
            span = f"{unit} {missing[0]}" if len(missing) == 1 else f"{unit}s {missing[0]} to {missing[-1]}"
            raise EngineError(f"three replicas died over {span} ({why})", fix=f"{self.pieces.fix}; {RESUME}")
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
        self.room, self.replicas = room, list[ReplicaHandle]()
        self.show: Callable[[str], None] | None = getattr(progress, "detail", None)  # gets the number of ready replicas
        self._shown = 0.0  # when ``show`` was last called
        self.probe: Any = None  # what every replica scores first
        self._refusal: ScoremodeError | None = None  # the first one
        self._idle_since, self._told_waiting = time.monotonic(), False  # since when no replica is ready
        self.cluster = Cluster(spread, room)
        self._ray = self.cluster.ray
        self.log = ReplicaLog(spread.replicas, self.cluster.address)
        self.log.say = getattr(progress, "say", None) or self.log.say
        try:
            self._check_room()
            for stats in self.log.replicas:
                self.replicas.append(self._start(stats, spec, environment_of(spread)))
            opened = self.wait_for_one().opened
        except BaseException:
            self.close()
            raise
        assert opened is not None
        self.facts, self.about = opened.facts, opened.about

    def _check_room(self) -> None:
        fitting, count = self.cluster.fitting(self.room), len(self.log.replicas)
        needed, offered = self.room.words, self.cluster.offers()
        if not fitting:
            raise EngineError(
                f"a replica needs {needed} on one node; the cluster has {offered}",
                fix="give fewer --gpus-per-replica or --cpus-per-replica, or a larger cluster",
            )
        if fitting < count:
            self.log.event(
                f"room for {fitting} of {count} replicas ({needed} each; the cluster has {offered}); the others join "
                "when there is room"
            )

    def _start(self, stats: ReplicaStats, spec: ReplicaSpec, environment: dict[str, str]) -> ReplicaHandle:
        """Starts an actor, which Ray starts again wherever there is room if its process or its node dies."""
        needs = {"num_cpus": self.room.cpus, "num_gpus": self.room.gpus, "runtime_env": {"env_vars": environment}}
        replica = ReplicaHandle(stats, self._ray.remote(Replica).options(max_restarts=-1, **needs).remote(spec))
        replica.open()
        return replica

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
            for replica, said in self._poll():
                self._lost(None, replica, said)
        return min(self.ready, key=lambda replica: len(replica.sent))

    def wait_for_all(self, seconds: float) -> int:
        """Waits until all replicas are ready or left out, at most ``seconds``. Returns how many are ready."""
        until = time.monotonic() + seconds
        while any(one.opening is not None for one in self.replicas) and time.monotonic() < until:
            for replica, said in self._poll():
                self._lost(None, replica, said)
        return len(self.ready)

    def _poll(self) -> Iterator[tuple[ReplicaHandle, Any]]:
        """Yields what replicas have said since the last poll: items of streams, or the error of one that died."""
        self._require_room()
        if self.show is not None and time.monotonic() - self._shown >= SHOW_SECONDS:
            self._shown = time.monotonic()
            self.show(f"{len(self.ready)}/{len(self.replicas)} replicas")
        asked = {one.call: one for one in self.replicas if one.call is not None}
        if not asked:
            return
        self._ray.wait(list(asked), num_returns=1, timeout=0.25)
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for call in answered:
            replica = asked[call]
            try:
                said = self._ray.get(call if replica.opening is not None else next(call))
            except StopIteration:
                said = EngineError("its answers ended before they were complete", fix="run it again")
            except self._ray.exceptions.RayError as error:
                said = error
            if said is None and not replica.is_up:
                replica.opening, replica.is_up = replica.actor.open.remote(), True
            elif isinstance(said, Opened):
                replica.opening, replica.opened, replica.failures = None, said, 0
                replica.stats.add_start(said.host, said.facts.device, said.seconds)
            else:
                yield replica, said

    def _require_room(self) -> None:
        """Raises an error if no replica is ready and there is no room for one, for longer than a lost node needs."""
        now = time.monotonic()
        if self.ready:
            self._idle_since = now
        waited = now - self._idle_since
        if waited > NO_ROOM_SECONDS and not self.cluster.fitting(self.room):
            raise EngineError(
                f"all replicas are gone and there is no room for one; {self.cluster.offers()}", fix=RESUME
            )
        if waited > WAITING_SECONDS and not self._told_waiting:
            self._told_waiting = True
            needed, offered = self.room.words, self.cluster.offers()
            self.log.event(f"waiting for a replica to start, which needs {needed}; the cluster has {offered}")

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def share(self, pieces: Pieces, done: Bools) -> Iterator[tuple[int, Any]]:
        """Yields all results that are not ``done``, with their indices, in any order."""
        self.log.unit, work = pieces.unit, Shared(pieces, done)
        try:
            while work.waiting or any(number != PROBE for one in self.replicas for number, _ in one.sent):
                for replica in self.ready:
                    self._send(work, replica)
                for replica, said in self._poll():
                    yield from self._handle(work, replica, said)
                    self._send(work, replica)  # before others are handled, because this replica may be idle
        finally:
            for replica in self.replicas:  # nobody reads what they still say; they finish their current piece
                replica.sent.clear()

    def _send(self, work: Shared, replica: ReplicaHandle) -> None:
        if replica.opened is not None and not replica.sent and not replica.is_probed and self.probe is not None:
            replica.send(PROBE, "probe", self.probe)
        while replica.opened is not None and work.waiting and len(replica.sent) < work.pieces.ahead:
            number = work.waiting.popleft()
            if work.missing(number):
                replica.send(number, work.pieces.method, *work.pieces.arguments(number, work.done))

    def _handle(self, work: Shared, replica: ReplicaHandle, said: Any) -> Iterator[tuple[int, Any]]:
        number = replica.sent[0][0] if replica.sent else PROBE
        if replica.sent and number == PROBE and isinstance(said, ScoremodeError):
            replica.sent.popleft()
            replica.is_probed = True
            self.log.add_probe(replica.stats, said)
        elif isinstance(said, Exception):
            self._lost(work, replica, said)
        elif isinstance(said, Finished):
            replica.sent.popleft()
            replica.stats.seconds += said.seconds
            if number != PROBE and (missing := work.missing(number)):
                raise EngineError(
                    f"the engine left {work.pieces.unit} {missing[0]} without an answer", fix="run it again"
                )
        elif number == PROBE:
            replica.is_probed = True
            self.log.add_probe(replica.stats, said)
        else:
            for place, result in work.pieces.read(said):
                index = int(work.pieces.members[number][place])
                if not work.done[index]:
                    work.done[index] = True
                    replica.stats.windows += 1
                    yield index, result

    def _lost(self, work: Shared | None, replica: ReplicaHandle, error: Exception) -> None:
        """Gives the pieces of a replica that died, or whose engine failed, to others. Ray starts it again."""
        name, why = replica.stats.name, str(error) if isinstance(error, ScoremodeError) else reason_of(error)
        if replica.opening is not None:
            replica.failures += 1
            if isinstance(error, ScoremodeError) or not replica.is_up or replica.failures >= MOST_STARTS:
                self._leave_out(replica, error, why)
            else:
                replica.open()
            return
        numbers = [number for number, _ in replica.sent if number != PROBE]
        again = 0 if work is None else work.put_back(numbers, error, why)
        self._idle_since = time.monotonic()
        self.log.counts["deaths"] += 1
        self.log.counts["again"] += again
        words = f"; {again} {self.log.unit}s go to others" if again else ""
        self.log.event(f"{name} is gone ({why}){words}", is_detail=not numbers)
        if isinstance(error, ScoremodeError):  # Ray does not know that it failed
            self._ray.kill(replica.actor, no_restart=False)
        replica.open()

    def _leave_out(self, replica: ReplicaHandle, error: Exception, why: str) -> None:
        """Ends a replica that cannot open its worker. Raises the first such error if no replica is left."""
        if isinstance(error, ScoremodeError):
            self._refusal = self._refusal or error
        replica.is_left_out = True
        self._end(replica)
        self.log.counts["left out"] += 1
        if len(self.replicas) > 1:
            self.log.event(f"{replica.stats.name} is left out: {why}")
        if not self.sharers:
            gone = "the replica is gone" if len(self.replicas) == 1 else f"all {len(self.replicas)} replicas are gone"
            raise self._refusal or EngineError(f"{gone} ({why})", fix=RESUME)

    def notes(self) -> list[str]:
        return self.log.notes()

    # ── questions to one replica ─────────────────────────────────────────────────────────────────────────────────────
    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of one replica, or of another if that one dies. Raises an error that the engine returns."""
        why = ""
        for _ in range(MOST_DEATHS):
            replica = self.wait_for_one()
            try:
                found = self._ray.get(replica.actor.call.remote(method, *arguments))
            except self._ray.exceptions.RayError as error:
                why = reason_of(error)
                self._lost(None, replica, error)
                continue
            if isinstance(found, ScoremodeError):
                raise found
            return found
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
                    if not replica.is_left_out:
                        self._end(replica)
        finally:
            self.replicas = []
            self.cluster.close()
