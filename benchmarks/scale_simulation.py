"""A run on many replicas, event by event: starts, leases, answers, failures, and the one driver that takes them all.

Nothing here is a formula for efficiency. Replicas start, ask for work, answer block by block, die and come back as
events on a clock, and the scheduler is scoremode's own (``cluster.leases``). What is not measured is an assumption and
is named as one in ``Assumptions``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

HOUR = 3600.0


@dataclass(frozen=True)
class Measured:
    """Figures of benchmarks/RESULTS.md, or of ``scale.py`` on this machine."""

    tokens_per_second: float  # of one replica
    driver_targets_per_second: float
    block_targets: int  # targets that travel together
    block_seconds: float = 0.0  # of the driver, for a block, whatever is in it


@dataclass(frozen=True)
class Assumptions:
    """What nobody could measure here."""

    start_median: float = 90.0  # seconds until a replica answers: weights, compilation, self-test, probe
    start_spread: float = 0.35  # standard deviation of its logarithm
    slow_share: float = 0.01  # of replicas that run at slow_rate
    slow_rate: float = 0.5
    jitter: float = 0.03  # standard deviation of a lease's duration, relative
    failures_per_gpu_hour: float = 419 / (54 * 24 * 16384)  # interruptions in Llama 3's training, as published
    lost_nodes: float = 0.1  # share of failures that take a whole node
    gpus_per_node: int = 8
    noticed_after: float = 30.0  # seconds until a lost node is known as lost; a dead process is known at once
    gpus_per_replica: int = 1


@dataclass(frozen=True)
class Job:
    """What is scored: shards of one size, as a plan of equal windows gives them."""

    tokens: int
    shard_tokens: int
    targets_per_token: float = 1.0

    @property
    def shards(self) -> int:
        return math.ceil(self.tokens / self.shard_tokens)


LeaseSize = Callable[[int, int, float], int]
"""Shards left, replicas, shards per second of the one that asks -> shards of its next lease."""


@dataclass
class Outcome:
    """Where the time of all replicas went, in replica seconds, and what happened."""

    replicas: int
    seconds: float = 0.0
    useful: float = 0.0
    starting: float = 0.0
    waiting_for_driver: float = 0.0
    idle_at_end: float = 0.0
    lost_work: float = 0.0
    copied_work: float = 0.0
    deaths: int = 0
    copies: int = 0
    driver_busy: float = 0.0

    def share(self, part: float) -> float:
        return part / (self.replicas * self.seconds)

    @property
    def efficiency(self) -> float:
        """Useful seconds of replicas at full speed, of all that were paid for."""
        return self.share(self.useful)


@dataclass
class _Lease:
    shards: list[int]
    begun: float
    seconds_each: float
    answered: int = 0  # of ``shards``, in order


@dataclass
class _Replica:
    rate: float  # of full speed
    node: int
    epoch: int = 0  # a later event of an earlier life is void
    lease: _Lease | None = None
    idle_since: float | None = None
    starts_at: float = 0.0


@dataclass
class Simulation:
    """One run. ``run`` plays it to its end."""

    job: Job
    replicas: int
    measured: Measured
    assumed: Assumptions
    lease_size: LeaseSize
    seed: int = 0
    copies_stragglers: bool = True
    outcome: Outcome = field(init=False)

    def run(self) -> Outcome:
        self._random = random.Random(self.seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.now = self._driver_free = 0.0
        self.outcome = Outcome(self.replicas)
        self._left = list(range(self.job.shards))[::-1]  # popped from the end, so in the plan's order
        self._done = bytearray(self.job.shards)
        self._missing = self.job.shards
        self._members = [self._replica(i) for i in range(self.replicas)]
        for replica in self._members:
            self._start(replica)
        self._plan_failure()
        while self._missing:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self._close()
        return self.outcome

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _replica(self, index: int) -> _Replica:
        slow = self._random.random() < self.assumed.slow_share
        node = index * self.assumed.gpus_per_replica // self.assumed.gpus_per_node
        return _Replica(self.assumed.slow_rate if slow else 1.0, node)

    def _start(self, replica: _Replica, delay: float = 0.0) -> None:
        replica.epoch += 1
        replica.starts_at = self.now
        needed = self._random.lognormvariate(math.log(self.assumed.start_median), self.assumed.start_spread)
        self._at(self.now + delay + needed, replica, lambda: self._started(replica))

    def _started(self, replica: _Replica) -> None:
        self.outcome.starting += self.now - replica.starts_at
        replica.idle_since = self.now
        self._give_work(replica)

    def _give_work(self, replica: _Replica) -> None:
        shards = self._next_shards(replica)
        if not shards:
            return
        if replica.idle_since is not None:
            self.outcome.idle_at_end += self.now - replica.idle_since
            replica.idle_since = None
        full_speed = self.job.shard_tokens / self.measured.tokens_per_second
        noise = max(0.5, self._random.gauss(1.0, self.assumed.jitter))
        replica.lease = _Lease(shards, self.now, full_speed / replica.rate * noise)
        self._at(self.now + replica.lease.seconds_each, replica, lambda: self._answered(replica))

    def _next_shards(self, replica: _Replica) -> list[int]:
        rate = replica.rate * self.measured.tokens_per_second / self.job.shard_tokens
        size = self.lease_size(len(self._left), self.replicas, rate)
        taken = [self._left.pop() for _ in range(min(size, len(self._left)))]
        if taken or not self.copies_stragglers:
            return taken
        return self._copy_of_a_straggler(replica)

    def _copy_of_a_straggler(self, replica: _Replica) -> list[int]:
        """Shards of the lease that would end last, if this replica would answer them sooner."""
        full_speed = self.job.shard_tokens / self.measured.tokens_per_second / replica.rate
        slowest, gain = None, 0.0
        for other in self._members:
            lease = other.lease
            if other is replica or lease is None:
                continue
            waiting = [shard for shard in lease.shards[lease.answered :] if not self._done[shard]]
            end = lease.begun + len(lease.shards) * lease.seconds_each
            if waiting and end - self.now - len(waiting) * full_speed > gain:
                slowest, gain = waiting, end - self.now - len(waiting) * full_speed
        if slowest is None:
            return []
        self.outcome.copies += len(slowest)
        return slowest

    def _answered(self, replica: _Replica) -> None:
        """One shard is computed: it goes to the driver; a replica that is far ahead of the driver waits for it."""
        lease = replica.lease
        assert lease is not None
        shard = lease.shards[lease.answered]
        lease.answered += 1
        taken_at = self._driver_takes()
        full_speed = self.job.shard_tokens / self.measured.tokens_per_second
        if self._done[shard]:
            self.outcome.copied_work += lease.seconds_each
        else:
            self._done[shard] = 1
            self._missing -= 1
            self.outcome.useful += full_speed
            self.outcome.lost_work += lease.seconds_each - full_speed  # slower than full speed
        behind = max(0.0, taken_at - self.now - 2 * lease.seconds_each)  # blocks in flight before it must wait
        self.outcome.waiting_for_driver += behind
        if lease.answered < len(lease.shards):
            self._at(self.now + behind + lease.seconds_each, replica, lambda: self._answered(replica))
            return
        replica.lease, replica.idle_since = None, self.now + behind
        if behind:
            self._at(self.now + behind, replica, lambda: self._give_work(replica))
        else:
            self._give_work(replica)

    def _driver_takes(self) -> float:
        """The driver is one process: blocks wait in line."""
        targets = self.job.shard_tokens * self.job.targets_per_token
        blocks = max(1, math.ceil(targets / self.measured.block_targets))
        seconds = targets / self.measured.driver_targets_per_second + blocks * self.measured.block_seconds
        self._driver_free = max(self._driver_free, self.now) + seconds
        self.outcome.driver_busy += seconds
        return self._driver_free

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _plan_failure(self) -> None:
        per_second = self.assumed.failures_per_gpu_hour * self.replicas * self.assumed.gpus_per_replica / HOUR
        if per_second > 0:
            wait = self._random.expovariate(per_second)
            heapq.heappush(self._events, (self.now + wait, next(self._order), self._fail))

    def _fail(self) -> None:
        victim = self._random.choice(self._members)
        whole_node = self._random.random() < self.assumed.lost_nodes
        victims = [r for r in self._members if r.node == victim.node] if whole_node else [victim]
        for replica in victims:
            self._kill(replica, self.assumed.noticed_after if whole_node else 0.0)
        self._plan_failure()

    def _kill(self, replica: _Replica, noticed_after: float) -> None:
        self.outcome.deaths += 1
        lease, replica.lease = replica.lease, None
        if lease is not None:
            begun = lease.begun + lease.answered * lease.seconds_each
            self.outcome.lost_work += max(0.0, self.now - begun)
            back = [shard for shard in lease.shards[lease.answered :] if not self._done[shard]]
            when = self.now + noticed_after
            heapq.heappush(self._events, (when, next(self._order), lambda: self._return(back)))
        elif replica.idle_since is None:
            self.outcome.starting += self.now - replica.starts_at
        replica.idle_since = None
        self._start(replica, noticed_after)

    def _return(self, shards: list[int]) -> None:
        """Shards of a dead replica are given out again, and those that wait for work are woken."""
        self._left += [shard for shard in shards[::-1] if not self._done[shard]]
        for replica in self._members:
            if replica.lease is None and replica.idle_since is not None:
                self._give_work(replica)

    # ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _at(self, when: float, replica: _Replica, action: Callable[[], None]) -> None:
        epoch = replica.epoch

        def unless_it_died() -> None:
            if replica.epoch == epoch:
                action()

        heapq.heappush(self._events, (when, next(self._order), unless_it_died))

    def _close(self) -> None:
        """The last answer is in: charge what each replica was doing meanwhile."""
        end = max(self.now, self._driver_free)
        self.outcome.seconds = end
        for replica in self._members:
            if replica.lease is not None:
                begun = replica.lease.begun + replica.lease.answered * replica.lease.seconds_each
                self.outcome.copied_work += max(0.0, end - begun)
            elif replica.idle_since is not None:
                self.outcome.idle_at_end += max(0.0, end - replica.idle_since)
            else:
                self.outcome.starting += end - replica.starts_at
