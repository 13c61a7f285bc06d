"""The replicas of one model: started, watched, started again, left out. One slot for each, whoever fills it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scoremode.cluster import ray_token
from scoremode.cluster.account import Account, Member
from scoremode.cluster.ledger import Pace
from scoremode.cluster.parcels import Parcel
from scoremode.cluster.replica import Opened, Replica, Spec
from scoremode.cluster.spread import Room
from scoremode.cluster.starting import Cluster
from scoremode.cluster.wants import Refusal
from scoremode.errors import EngineError, ScoremodeError, one_line

MOST_FAILURES = 3  # starts in a row of which nothing came
PAUSE = (0.0, 1.0, 4.0)  # seconds before another start
NO_ROOM_SECONDS = 15.0  # that a cluster may be without room for a single replica: a node may be on its way back
WAITING_SECONDS = 10.0  # after which a user is told what is waited for
FAREWELL = 5.0  # seconds for engines to end what they started
TELL_SECONDS = 0.25
SHOWN = 8  # replicas whose rates are shown one by one
AHEAD = 8  # blocks of a replica that may wait to be read
RESUME = "what was scored is kept: run the same command again to resume"


@dataclass(eq=False)
class Lease:
    """Batches that a replica computes, and the answers on their way."""

    batches: list[int]
    parcel: Parcel
    tokens: int
    stream: Any
    sent: float
    is_copied: bool = False


@dataclass(eq=False)
class Slot:
    """A place for a replica."""

    number: int
    actor: Any = None
    group: Any = None  # the placement group, if it has one
    placing: Any = None  # answered as soon as it has a process; None: it has
    opening: Any = None  # what it will say when it is open
    opened: Opened | None = None
    probing: Any = None
    is_probed: bool = False
    leases: deque[Lease] = field(default_factory=deque)
    pace: Pace = field(default_factory=Pace)
    starts: int = 0
    failures: int = 0  # in a row
    not_before: float = 0.0
    is_left_out: bool = False

    @property
    def name(self) -> str:
        return f"replica {self.number + 1}"

    @property
    def incarnation(self) -> str:
        return f"{self.number}.{self.starts}"

    @property
    def is_ready(self) -> bool:
        return self.opened is not None


@dataclass(frozen=True, slots=True)
class Probed:
    """The probe window as a replica scored it, or why it could not."""

    said: Any


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica is gone, and why."""

    why: str


class Crew:
    """All slots."""

    def __init__(
        self,
        cluster: Cluster,
        spec: Spec,
        *,
        count: int,
        room: Room,
        environment: Mapping[str, str],
        account: Account,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.tell, self._told = tell, 0.0  # what each replica does, and when that was told
        self.cluster, self.spec, self.room, self.account = cluster, spec, room, account
        self._environment = dict(environment)
        self._ray = cluster.ray
        self.slots = [Slot(number) for number in range(count)]
        self._first_refusal: Refusal | None = None
        self._last_words = "none could start"
        self._idle_since: float | None = None  # since when nobody is ready
        self._told_waiting = False
        self._require_room(count)

    def _require_room(self, count: int) -> None:
        fitting = self.cluster.fitting(self.room)
        if not fitting:
            raise self._no_room()
        if fitting < count:
            need, have = self.room.words, self.cluster.offers()
            self.account.event(
                f"room for {fitting} of {count} replicas ({need} each; the cluster has {have}); the others join when "
                "there is room"
            )

    def _no_room(self) -> EngineError:
        fix = "give fewer --gpus-per-replica or --cpus-per-replica, or a larger cluster"
        have = self.cluster.offers()
        return EngineError(f"a replica needs {self.room.words} on one node; the cluster has {have}", fix=fix)

    # ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def ready(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_ready]

    @property
    def sharers(self) -> int:
        """How many share the work, those on their way included."""
        return sum(not slot.is_left_out for slot in self.slots)

    def wait_for_one(self) -> Slot:
        """A replica that is open; the one with the least to do."""
        while not self.ready:
            self._hear()
        return min(self.ready, key=lambda slot: len(slot.leases))

    def wait_for_all(self, seconds: float) -> int:
        """Wait until all are open or left out; how many are open."""
        until = time.monotonic() + seconds
        while not all(slot.is_ready or slot.is_left_out for slot in self.slots) and time.monotonic() < until:
            self._hear()
        return len(self.ready)

    def _hear(self) -> None:
        """While nothing is scored: who is open, and who is gone before that."""
        for slot, item in self.items():
            if isinstance(item, Lost):
                self.account.event(f"{slot.name} was gone before it scored anything ({item.why})", aloud=False)
                self.lost(slot, item.why)

    def tend(self) -> None:
        """Start what should run and does not; say what is waited for; give up if nobody is left."""
        now = time.monotonic()
        for slot in self.slots:
            if slot.actor is None and not slot.is_left_out and now >= slot.not_before:
                self._start(slot)
        if all(slot.is_left_out for slot in self.slots):
            raise self._nobody()
        if self.ready:
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        waited = now - self._idle_since
        if waited > NO_ROOM_SECONDS and not self.cluster.fitting(self.room):
            raise EngineError(
                f"all replicas are gone and there is no room for one; {self.cluster.offers()}", fix=RESUME
            )
        if waited > WAITING_SECONDS and not self._told_waiting and all(slot.placing is not None for slot in self.slots):
            self._told_waiting = True
            have = f"the cluster has {self.cluster.offers()}"
            self.account.event(f"waiting for {self.room.words} to become free, or for Ray to start a process; {have}")

    def _nobody(self) -> ScoremodeError:
        if self._first_refusal is not None:
            return self._first_refusal.error()
        count = len(self.slots)
        what = "the replica is gone" if count == 1 else f"all {count} replicas are gone"
        return EngineError(f"{what} ({self._last_words})", fix=RESUME)

    # ── coming and going ─────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, slot: Slot) -> None:
        slot.starts += 1
        slot.pace, slot.probing, slot.is_probed = Pace(), None, False
        wanted: dict[str, Any] = {
            "max_restarts": 0,
            "max_task_retries": 0,
            "num_cpus": self.room.all_cpus,
            "num_gpus": self.room.all_gpus,
            "runtime_env": {"env_vars": self._environment},
        }
        if self.room.over_nodes:
            wanted |= self._group_for(slot)
        slot.actor = self._ray.remote(Replica).options(**wanted).remote()
        slot.placing = slot.actor.where.remote()
        slot.opening = slot.actor.open.remote(self.spec)

    def _group_for(self, slot: Slot) -> dict[str, Any]:
        """A bundle for each rank; the replica itself lies in the first, and its engine places the ranks in all."""
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {kind: n for kind, n in (("GPU", self.room.gpus), ("CPU", self.room.cpus)) if n}
        slot.group = placement_group([dict(bundle) for _ in range(self.room.ranks)], strategy="PACK")
        strategy = PlacementGroupSchedulingStrategy(slot.group, 0, placement_group_capture_child_tasks=True)
        return {"scheduling_strategy": strategy, "num_gpus": 0, "num_cpus": self.room.cpus}

    def settle(self, slot: Slot, said: Opened | Refusal) -> None:
        """A replica has opened its engine, or said why not."""
        slot.opening = None
        if isinstance(said, Refusal):
            self._refused_to_open(slot, said)
            return
        slot.opened = said
        member = self.account.members.setdefault(slot.number, Member(slot.name))
        member.host, member.device, member.seconds_to_start = said.host, said.facts.device, said.seconds
        member.starts += 1
        if member.starts > 1:
            self.account.event(f"{slot.name} is back, on {said.host}", aloud=False)

    def _refused_to_open(self, slot: Slot, said: Refusal) -> None:
        self._first_refusal = self._first_refusal or said
        slot.failures += 1
        self._end(slot)
        if said.is_input or said.fix.startswith(("give every node", "install the same")) or len(self.slots) == 1:
            slot.failures = MOST_FAILURES
        self._again_or_not(slot, str(said.error()))

    def lost(self, slot: Slot, why: str) -> None:
        """A replica is gone: another one takes its place, unless that failed too often."""
        self._last_words = why
        self.account.counts["deaths"] += 1
        slot.failures += 1
        self._end(slot)
        self._again_or_not(slot, why)

    def _again_or_not(self, slot: Slot, why: str) -> None:
        if slot.failures >= MOST_FAILURES:
            slot.is_left_out = True
            self.account.counts["left out"] += 1
            if len(self.slots) > 1:
                self.account.event(f"{slot.name} is left out: {why}")
            return
        slot.not_before = time.monotonic() + PAUSE[slot.failures - 1]

    def restart(self, slot: Slot) -> None:
        """End a replica whose engine failed; a fresh one takes its place."""
        slot.failures += 1
        self._end(slot)
        self._again_or_not(slot, "its engine failed again and again")

    def is_node_lost(self, slot: Slot) -> bool:
        return slot.opened is not None and not self.cluster.is_alive(slot.opened.node)

    def _end(self, slot: Slot) -> None:
        actor, slot.actor = slot.actor, None
        slot.placing = slot.opening = slot.opened = slot.probing = None
        slot.leases.clear()
        if actor is not None:
            self._ray.kill(actor)
        self._remove_group(slot)

    def _remove_group(self, slot: Slot) -> None:
        group, slot.group = slot.group, None
        if group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(group)

    # ── what they say ────────────────────────────────────────────────────────────────────────────────────────────────
    def lease(self, slot: Slot, method: Callable[[Any], Any], batches: list[int], parcel: Parcel, tokens: int) -> Lease:
        stream = method(slot.actor.score.options(num_returns="streaming", _generator_backpressure_num_objects=AHEAD))
        found = Lease(batches, parcel, tokens, stream, time.monotonic())
        slot.leases.append(found)
        return found

    def items(self, timeout: float = 0.25) -> Iterator[tuple[Slot, Any]]:
        """What replicas have said since the last time: blocks and last words, probes, and that they are lost."""
        self.tend()
        self._show()
        asked: dict[Any, Slot] = {}
        for slot in self.slots:
            heads = (slot.placing, slot.opening, slot.probing, slot.leases[0].stream if slot.leases else None)
            asked |= {one: slot for one in heads if one is not None}
        if not asked:
            time.sleep(min(timeout, 0.05))
            return
        everything = list(asked)
        self._ray.wait(everything, num_returns=1, timeout=timeout)
        ready, _ = self._ray.wait(everything, num_returns=len(everything), timeout=0)
        for one in ready:
            slot = asked[one]
            if slot.actor is None:  # it was lost a moment ago
                continue
            said = self._said(slot, one)
            if said is not None:
                yield slot, said

    def _show(self) -> None:
        now = time.monotonic()
        if self.tell is not None and now - self._told >= TELL_SECONDS:
            self._told = now
            self.tell(words_for(self.slots))

    def _said(self, slot: Slot, one: Any) -> Any:
        try:
            if one is slot.placing:
                slot.placing = None
                self._ray.get(one)
                return None
            if one is slot.opening:
                self.settle(slot, self._ray.get(one))
                return None
            if one is slot.probing:
                slot.probing = None
                return Probed(self._ray.get(one))
            return self._ray.get(next(one))
        except StopIteration:
            return Lost("its answers ended before they were complete")
        except self._ray.exceptions.RayError as error:
            return Lost(reason(error))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Let one replica answer; another one if it is lost on the way. An error of its engine is raised."""
        while True:
            slot = self.wait_for_one()
            try:
                found = self._ray.get(getattr(slot.actor, method).remote(*arguments))
            except self._ray.exceptions.RayError as error:
                self.account.event(f"{slot.name} is gone ({reason(error)})")
                self.lost(slot, reason(error))
                continue
            if isinstance(found, Refusal):
                raise found.error()
            return found

    def forget_leases(self) -> None:
        """Nobody reads the rest; replicas finish what they are at."""
        for slot in self.slots:
            slot.leases.clear()

    def close(self) -> None:
        """End all replicas; each may end its engine first."""
        ending = [slot.actor.close.remote() for slot in self.slots if slot.actor is not None and slot.is_ready]
        if ending and self._ray.is_initialized():
            self._ray.wait(ending, num_returns=len(ending), timeout=FAREWELL)
        for slot in self.slots:
            self._end(slot)


def reason(error: Exception) -> str:
    """Why a replica is gone, in a few words of Ray's many."""
    text = " ".join(str(error).split())
    if ray_token.is_wrong(text):
        return ray_token.WRONG_TOKEN
    if "OOM" in type(error).__name__ or "OutOfMemory" in type(error).__name__ or "memory pressure" in text:
        return "it was killed because the node's memory was used up"
    if (
        "node" in text.lower()
        and ("died" in text or "failed" in text or "lost" in text)
        and "worker process" not in text
    ):
        return "its node is gone"
    if "unavailable" in type(error).__name__.lower():
        return "it can no longer be reached: its process or its node is gone"
    if "worker process has died" in text or "unexpected system error" in text:
        return "its process was killed or crashed"
    return one_line(text)[:200] or type(error).__name__


def words_for(slots: list[Slot]) -> str:
    """``3/4 replicas: 12k 11k 12k –``: tokens per second of each; a dash for one that is not ready.

    >>> words_for([Slot(0), Slot(1)])
    '0/2 replicas: – –'
    """
    ready = sum(slot.is_ready for slot in slots)
    rates = " ".join(_short(slot) for slot in slots[:SHOWN]) + (" …" if len(slots) > SHOWN else "")
    return f"{ready}/{len(slots)} replicas: {rates}"


def _short(slot: Slot) -> str:
    rate = slot.pace.rate
    if not slot.is_ready or rate is None:
        return "–" if not slot.is_ready else "…"
    return f"{rate / 1000:.0f}k" if rate >= 10_000 else f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"
