"""Starts, polls and restarts the replicas of one model, and gives them work. This code runs in the driver."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.replicas import OTHER_FILES, Pieces, Spread
from scoremode.errors import EngineError, InputError, ScoremodeError
from scoremode.remote.ray.pieces import Piece, Piecework, ReplicaHandle, StudyWork
from scoremode.remote.ray.ray_cluster import Cluster, reason_of
from scoremode.remote.ray.replica import Finished, Opened, Replica, ReplicaSpec
from scoremode.remote.ray.replica_log import ReplicaLog
from scoremode.remote.ray.room import Room
from scoremode.values import Bools

MOST_FAILURES = 3  # starts in a row without an answer, after which a replica is left out
PAUSE = (0.0, 1.0, 4.0)  # seconds to wait before the next start
NO_ROOM_SECONDS = 15.0  # how long a cluster may lack room for a single replica; a lost node may come back
WAITING_SECONDS = 10.0  # after this time, the user is told what the pool waits for
CLOSE_SECONDS = 5.0  # how long engines may take to end the processes that they started
SHOW_SECONDS = 0.25  # between two updates of the progress line
ALONE_AFTER = 2  # deaths over a piece, after which its parts are sent one by one, to know which one causes them
MOST_DEATHS = 3  # of replicas over one part
STREAM = "stream"  # what a replica says about a piece
RESUME = "what was scored is kept: run the same command again to resume"


@dataclass(frozen=True, slots=True)
class Lost:
    """The result of a call whose replica died, with the reason."""

    why: str


def environment_of(spread: Spread) -> dict[str, str]:
    """Returns the variable for as many threads per replica as here: the bits of a CPU's sums depend on the number."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if not threads and spread.cpus_per_replica is not None and spread.cpus_per_replica >= 1:
        threads = str(int(spread.cpus_per_replica))
    elif not threads and "torch" in sys.modules:
        threads = str(sys.modules["torch"].get_num_threads())
    return {"OMP_NUM_THREADS": threads} if threads else {}


class ReplicaPool:
    """Starts all replicas of a model, polls them, gives them work, and restarts those that died."""

    def __init__(self, spec: ReplicaSpec, room: Room, spread: Spread, progress: Progress | None) -> None:
        """Returns as soon as one replica is ready; the others join later."""
        self.spec, self.room = spec, room
        self.show: Callable[[str], None] | None = getattr(progress, "detail", None)  # gets the number of ready replicas
        self._shown = 0.0  # when ``show`` was last called
        self._environment = environment_of(spread)
        self.replicas: list[ReplicaHandle] = []
        self.cluster = Cluster(spread, room)
        self._ray = self.cluster.ray
        self.log = ReplicaLog(spread.replicas, self.cluster.address)
        self.log.say = getattr(progress, "say", None) or self.log.say
        self.replicas = [ReplicaHandle(stats) for stats in self.log.replicas]
        self._first_refusal: ScoremodeError | None = None
        self._last_reason = "none could start"
        self._idle_since: float | None = None  # since when no replica is ready
        self._told_waiting = False
        try:
            self._check_room()
            opened = self.wait_for_one().opened
        except BaseException:
            self.close()
            raise
        assert opened is not None
        self.facts, self.about = opened.facts, opened.about

    def _check_room(self) -> None:
        fitting, count = self.cluster.fitting(self.room), len(self.replicas)
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

    @property
    def ready(self) -> list[ReplicaHandle]:
        return [replica for replica in self.replicas if replica.is_ready]

    @property
    def sharers(self) -> int:
        """The number of replicas that share the work, including those that are starting."""
        return sum(not replica.is_left_out for replica in self.replicas)

    def wait_for_one(self) -> ReplicaHandle:
        """Waits until a replica is ready. Returns the ready replica with the fewest pieces."""
        while not self.ready:
            self._poll_starting()
        return min(self.ready, key=lambda replica: len(replica.sent))

    def wait_for_all(self, seconds: float) -> int:
        """Waits until all replicas are ready or left out, at most ``seconds``. Returns how many are ready."""
        until = time.monotonic() + seconds
        while not all(one.is_ready or one.is_left_out for one in self.replicas) and time.monotonic() < until:
            self._poll_starting()
        return len(self.ready)

    def _poll_starting(self) -> None:
        """Polls starting replicas and handles those that died."""
        for replica, result in self.poll():
            if isinstance(result, Lost):
                self.log.event(f"{replica.name} was gone before it scored anything ({result.why})", is_detail=True)
                self.replace(replica, result.why)

    def poll(self, timeout: float = 0.25) -> Iterator[tuple[ReplicaHandle, Any]]:
        """Restarts dead replicas, and yields what replicas said since the last poll; ``Lost`` if one has died."""
        self._restart_dead()
        if self.show is not None and time.monotonic() - self._shown >= SHOW_SECONDS:
            self._shown = time.monotonic()
            self.show(f"{len(self.ready)}/{len(self.replicas)} replicas")
        waiting = {call: (one, method) for one in self.replicas for method, call in one.calls.items()}
        waiting |= {one.sent[0][1]: (one, STREAM) for one in self.replicas if one.sent}
        if not waiting:
            time.sleep(min(timeout, 0.05))
            return
        self._ray.wait(list(waiting), num_returns=1, timeout=timeout)
        ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for call in ready:
            replica, method = waiting[call]
            if replica.actor is None:  # an earlier result in this loop showed that it died
                continue
            replica.calls.pop(method, None)
            try:
                result = self._ray.get(next(call) if method == STREAM else call)
            except StopIteration:
                yield replica, Lost("its answers ended before they were complete")
            except self._ray.exceptions.RayError as error:
                yield replica, Lost(reason_of(error))
            else:
                if method == "open":
                    self._set_opened(replica, result)
                elif method == STREAM:
                    yield replica, result

    def _restart_dead(self) -> None:
        """Starts replicas that do not run. Raises an error if all are left out, or the cluster has no room for one."""
        now = time.monotonic()
        for replica in self.replicas:
            if replica.actor is None and not replica.is_left_out and now >= replica.not_before:
                self._start(replica)
        if not self.sharers:
            gone = "the replica is gone" if len(self.replicas) == 1 else f"all {len(self.replicas)} replicas are gone"
            raise self._first_refusal or EngineError(f"{gone} ({self._last_reason})", fix=RESUME)
        if self.ready:
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        waited = now - self._idle_since
        if waited > NO_ROOM_SECONDS and not self.cluster.fitting(self.room):
            raise EngineError(
                f"all replicas are gone and there is no room for one; {self.cluster.offers()}", fix=RESUME
            )
        unplaced = all("where" in replica.calls for replica in self.replicas)
        if waited > WAITING_SECONDS and not self._told_waiting and unplaced:
            self._told_waiting = True
            have = f"the cluster has {self.cluster.offers()}"
            self.log.event(f"waiting for {self.room.words} to become free, or for Ray to start a process; {have}")

    def _start(self, replica: ReplicaHandle) -> None:
        replica.is_probed = False
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_task_retries": 0,
            "num_cpus": self.room.all_cpus,
            "num_gpus": self.room.all_gpus,
            "runtime_env": {"env_vars": self._environment},
        }
        if self.room.over_nodes:
            options |= self._over_nodes(replica)
        replica.actor = self._ray.remote(Replica).options(**options).remote()
        # "where" is answered as soon as the actor has a process
        replica.calls = {"where": replica.actor.where.remote(), "open": replica.actor.open.remote(self.spec)}

    def _over_nodes(self, replica: ReplicaHandle) -> dict[str, Any]:
        """Reserves a bundle of resources for each rank. Returns the options that put the actor in the first bundle."""
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {kind: n for kind, n in (("GPU", self.room.gpus), ("CPU", self.room.cpus)) if n}
        group = placement_group([dict(bundle) for _ in range(self.room.ranks)], strategy="PACK")
        replica.placement_group = group
        strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        return {"scheduling_strategy": strategy, "num_gpus": 0, "num_cpus": self.room.cpus}

    def _set_opened(self, replica: ReplicaHandle, said: Opened | ScoremodeError) -> None:
        """Notes that a replica opened its engine. If it returned an error instead, restarts it or leaves it out."""
        if isinstance(said, ScoremodeError):
            self._first_refusal = self._first_refusal or said
            is_final = isinstance(said, InputError) or said.fix == OTHER_FILES or len(self.replicas) == 1
            self._end_or_restart(replica, str(said), is_final=is_final)
            return
        replica.opened, stats = said, replica.stats
        stats.host, stats.device, stats.seconds_to_start = said.host, said.facts.device, said.seconds
        stats.starts += 1
        if stats.starts > 1:
            self.log.event(f"{replica.name} is back, on {said.host}", is_detail=True)

    def replace(self, replica: ReplicaHandle, why: str) -> None:
        """Ends a replica that died or whose engine failed. Starts a new one in its place unless it failed too often."""
        self._last_reason = why
        self.log.counts["deaths"] += 1
        self._end_or_restart(replica, why)

    def _end_or_restart(self, replica: ReplicaHandle, why: str, *, is_final: bool = False) -> None:
        replica.failures = MOST_FAILURES if is_final else replica.failures + 1
        self._end(replica)
        if replica.failures < MOST_FAILURES:
            replica.not_before = time.monotonic() + PAUSE[replica.failures - 1]
            return
        replica.is_left_out = True
        self.log.counts["left out"] += 1
        if len(self.replicas) > 1:
            self.log.event(f"{replica.name} is left out: {why}")

    def _end(self, replica: ReplicaHandle) -> None:
        actor, replica.actor, replica.opened = replica.actor, None, None
        group, replica.placement_group = replica.placement_group, None
        replica.calls.clear()
        replica.sent.clear()
        if actor is not None:
            self._ray.kill(actor)
        if group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(group)

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def share(self, pieces: Pieces, done: Bools) -> Iterator[tuple[int, Any]]:
        """Yields the results of a study's work that are not ``done``, with their indices."""
        yield from self.results(StudyWork(pieces, done))

    def results(self, work: Piecework) -> Iterator[Any]:
        """Yields all results, in any order. Pieces of a replica that dies or fails go to others."""
        self.log.unit = work.unit
        try:
            while work.waiting or any(replica.sent for replica in self.replicas):
                for replica in self.ready:
                    self._send(work, replica)
                for replica, said in self.poll():
                    yield from self._handle(work, replica, said)
                    self._send(work, replica)  # before others are handled, because this replica may be idle
        finally:
            for replica in self.replicas:  # nobody reads what they still say; they finish their current piece
                replica.sent.clear()

    def _send(self, work: Piecework, replica: ReplicaHandle) -> None:
        while replica.is_ready and work.waiting and len(replica.sent) < work.depth:
            piece = work.waiting.popleft()
            piece.numbers = work.unfinished(piece)
            if piece.numbers:
                replica.sent.append((piece, work.send(replica, piece)))

    def _handle(self, work: Piecework, replica: ReplicaHandle, said: Any) -> Iterator[Any]:
        match said:
            case Lost():
                self._lost(work, replica, said.why)
            case ScoremodeError():
                piece, _ = replica.sent[0]
                piece.failures += 1
                if isinstance(said, InputError) or piece.failures > 1:
                    raise said
                self._put_back(work, replica)
                self.log.event(f"the engine of {replica.name} failed: {said.message}; its {work.unit}s go to others")
                self.replace(replica, "its engine failed again and again")
            case Finished():
                piece, _ = replica.sent.popleft()
                replica.stats.seconds += said.seconds
                if missing := work.missing(piece):
                    words = f"the engine left {work.unit} {missing[0]} without an answer"
                    raise EngineError(words, fix="run it again")
            case _:
                replica.failures = 0
                yield from work.accept(replica, replica.sent[0][0], said)

    def _lost(self, work: Piecework, replica: ReplicaHandle, why: str) -> None:
        """Gives the pieces of a dead replica to others. Raises an error if three replicas died over the same part."""
        running = replica.sent[0][0] if replica.sent else None
        if replica.opened is not None and not self.cluster.is_alive(replica.opened.node):
            why = "its node is gone"
        elif running is not None:
            running.deaths += 1
        missing = work.missing(running) if running is not None else []
        again = self._put_back(work, replica)
        words = f"; {again} {work.unit}s go to others" if again else ""
        self.log.event(f"{replica.name} is gone ({why}){words}", is_detail=running is None)
        self.replace(replica, why)
        if running is not None and missing and running.deaths >= MOST_DEATHS:
            raise EngineError(f"three replicas died over {work.unit} {missing[0]} ({why})", fix=f"{work.fix}; {RESUME}")

    def _put_back(self, work: Piecework, replica: ReplicaHandle) -> int:
        """Lets the pieces of a replica wait again, before all others. Returns how many results they lack."""
        again = 0
        for piece, _ in reversed(replica.sent):
            again += len(work.missing(piece))
            parts = [piece]
            if piece.deaths >= ALONE_AFTER:
                parts = [Piece([number], piece.deaths, piece.failures) for number in work.unfinished(piece)]
            work.waiting.extendleft(reversed(parts))
        replica.sent.clear()
        self.log.counts["again"] += again
        return again

    def notes(self) -> list[str]:
        return self.log.notes()

    # ── questions to one replica ─────────────────────────────────────────────────────────────────────────────────────
    def put(self, value: Any) -> Any:
        """Sends a value once, for many calls; returns what to give to them in its place."""
        return self._ray.put(value)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of one replica, or of another if that one dies. Raises an error that the engine returns."""
        while True:
            replica = self.wait_for_one()
            try:
                found = self._ray.get(replica.actor.call.remote(method, *arguments))
            except self._ray.exceptions.RayError as error:
                self.log.event(f"{replica.name} is gone ({reason_of(error)})")
                self.replace(replica, reason_of(error))
                continue
            if isinstance(found, ScoremodeError):
                raise found
            return found

    def close(self) -> None:
        """Closes the workers of all replicas, then ends the replicas, and Ray if it was started for them."""
        try:
            ending = [replica.actor.close.remote() for replica in self.ready]
            if ending and self._ray.is_initialized():
                self._ray.wait(ending, num_returns=len(ending), timeout=CLOSE_SECONDS)
            for replica in self.replicas:
                self._end(replica)
        finally:
            self.cluster.close()
