"""A run on many replicas, event by event: starts, leases, blocks of answers, failures, and the one driver.

Nothing here is a formula for efficiency. Replicas start, are lent work, answer block by block, die and come back as
events on a clock. Who gets how much is decided by scoremode's own ledger (``cluster/ledger.py``), and late leases are
copied by its rule. What is not measured is an assumption, and is named as one in ``Assumptions``.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scoremode.cluster.dispatcher import BLOCKS_AHEAD, DEPTH, GRACE, LATE
from scoremode.cluster.ledger import Batches, Ledger, Pace

HOUR = 3600.0


@dataclass(frozen=True)
class Measured:
    """Figures of benchmarks/RESULTS.md, or of ``scale.py`` on this machine."""

    tokens_per_second: float  # of one replica
    driver_targets_per_second: float
    saved_targets_per_second: float  # statistics and columns, when the last answer is there
    block_seconds: float  # of the driver, for a block of answers, whatever is in it
    block_seconds_per_replica: float = 0.0  # more of that for each replica it has


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
    """What is scored, in blocks as replicas send them."""

    tokens: int
    block_tokens: int
    targets_per_token: float = 1.0

    @property
    def blocks(self) -> int:
        return math.ceil(self.tokens / self.block_tokens)


@dataclass
class Outcome:
    """Where the time of all replicas went, in replica seconds, and what happened."""

    replicas: int
    seconds: float = 0.0
    useful: float = 0.0
    starting: float = 0.0
    slow_or_lost: float = 0.0  # slower than full speed, or computed by one that died before it told
    copied: float = 0.0  # computed twice
    idle: float = 0.0  # nothing was left to do
    waiting_for_driver: float = 0.0
    deaths: int = 0
    copies: int = 0
    driver_busy: float = 0.0
    saving: float = 0.0  # seconds after the last answer, in which no replica is needed

    def share(self, part: float) -> float:
        return part / (self.replicas * self.seconds)

    @property
    def efficiency(self) -> float:
        """Useful seconds of replicas at full speed, of all that were paid for."""
        return self.share(self.useful)


@dataclass
class _Lease:
    blocks: list[int]
    sent: float
    tokens: int
    answered: int = 0  # of ``blocks``, in order
    is_copied: bool = False


@dataclass
class _Replica:
    rate: float  # of full speed
    node: int
    epoch: int = 0  # an event of an earlier life is void
    leases: deque[_Lease] = field(default_factory=deque)
    pace: Pace = field(default_factory=Pace)
    is_ready: bool = False
    computes_since: float = 0.0  # the block that it is at
    lease_begun: float = 0.0
    seconds_per_block: float = 0.0
    idle_since: float | None = None
    starts_at: float = 0.0


@dataclass
class Simulation:
    """One run. ``run`` plays it to its end."""

    job: Job
    replicas: int
    measured: Measured
    assumed: Assumptions
    seed: int = 0
    outcome: Outcome = field(init=False)

    def run(self) -> Outcome:
        self._random = random.Random(self.seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.now = self._driver_free = 0.0
        self.outcome = Outcome(self.replicas)
        n = self.job.blocks
        every = np.arange(n, dtype=np.int64)
        self.ledger = Ledger(Batches(every, every + 1, np.full(n, self.job.block_tokens)), np.zeros(n, np.bool_))
        self._block_seconds = self.job.block_tokens / self.measured.tokens_per_second  # at full speed
        self._members = [self._replica(i) for i in range(self.replicas)]
        self._ready = 0
        for replica in self._members:
            self._start(replica)
        self._plan_failure()
        while not self.ledger.finished:
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
        replica.pace = Pace()
        replica.starts_at = self.now
        needed = self._random.lognormvariate(math.log(self.assumed.start_median), self.assumed.start_spread)
        self._at(self.now + delay + needed, replica, lambda: self._started(replica))

    def _started(self, replica: _Replica) -> None:
        self.outcome.starting += self.now - replica.starts_at
        replica.is_ready, replica.idle_since = True, self.now
        self._ready += 1
        self._lend_to(replica)

    def _lend_to(self, replica: _Replica) -> None:
        """As ``cluster/dispatcher.py`` does: two leases at a time, the second when the first has told a rate."""
        while len(replica.leases) < DEPTH and not (replica.leases and replica.pace.rate is None):
            blocks = self.ledger.take(replica.pace, self._ready)
            if not blocks:
                break
            self._send(replica, _Lease(blocks, self.now, self.ledger.tokens(blocks)))
        if not replica.leases:
            self._copy_to(replica)

    def _send(self, replica: _Replica, lease: _Lease) -> None:
        replica.leases.append(lease)
        if len(replica.leases) == 1:
            begins = self.now
            if replica.idle_since is not None:
                begins = max(self.now, replica.idle_since)  # it may still wait for the driver
                self.outcome.idle += begins - replica.idle_since
                replica.idle_since = None
            self._begin(replica, begins)

    def _begin(self, replica: _Replica, when: float) -> None:
        """The first lease of a replica is computed from now on."""
        noise = max(0.5, self._random.gauss(1.0, self.assumed.jitter))
        replica.seconds_per_block = self._block_seconds / replica.rate * noise
        replica.lease_begun = when
        self._compute(replica, when)

    def _compute(self, replica: _Replica, when: float) -> None:
        replica.computes_since = when
        self._at(when + replica.seconds_per_block, replica, lambda: self._answered(replica))

    def _copy_to(self, idle: _Replica) -> None:
        """The oldest lease that is late, once."""
        rate = idle.pace.rate or self.measured.tokens_per_second
        late = [
            lease
            for other in self._members
            if other is not idle
            for lease in other.leases
            if not lease.is_copied and self.now - lease.sent > GRACE + LATE * lease.tokens / rate
        ]
        for lease in sorted(late, key=lambda found: found.sent):
            lease.is_copied = True
            left = self.ledger.unfinished(lease.blocks)
            if left:
                self.outcome.copies += 1
                self._send(idle, _Lease(left, self.now, self.ledger.tokens(left), is_copied=True))
                return

    def _answered(self, replica: _Replica) -> None:
        """A block is computed: it goes to the driver. A replica that is far ahead of the driver waits for it."""
        lease = replica.leases[0]
        block = lease.blocks[lease.answered]
        lease.answered += 1
        taken_at = self._driver_takes()
        if self.ledger.received(block):
            self.outcome.useful += self._block_seconds
            self.outcome.slow_or_lost += replica.seconds_per_block - self._block_seconds
        else:
            self.outcome.copied += replica.seconds_per_block
        behind = max(0.0, taken_at - self.now - BLOCKS_AHEAD * replica.seconds_per_block)
        self.outcome.waiting_for_driver += behind
        when = self.now + behind
        if lease.answered < len(lease.blocks):
            self._compute(replica, when)
            return
        replica.leases.popleft()
        replica.pace.measured(lease.tokens, max(1e-9, when - replica.lease_begun))
        if replica.leases:
            self._begin(replica, when)
        else:
            replica.idle_since = when
        self._at(max(when, taken_at), replica, lambda: self._lend_to(replica))

    def _driver_takes(self) -> float:
        """The driver is one process: blocks wait in line."""
        targets = self.job.block_tokens * self.job.targets_per_token
        overhead = self.measured.block_seconds + self.replicas * self.measured.block_seconds_per_replica
        seconds = targets / self.measured.driver_targets_per_second + overhead
        self._driver_free = max(self._driver_free, self.now) + seconds
        self.outcome.driver_busy += seconds
        return self._driver_free

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _plan_failure(self) -> None:
        per_second = self.assumed.failures_per_gpu_hour * self.replicas * self.assumed.gpus_per_replica / HOUR
        if per_second > 0:
            wait = self._random.expovariate(per_second)
            self._push(self.now + wait, self._fail)

    def _fail(self) -> None:
        victim = self._random.choice(self._members)
        whole_node = self._random.random() < self.assumed.lost_nodes
        victims = [r for r in self._members if r.node == victim.node] if whole_node else [victim]
        for replica in victims:
            self._kill(replica, self.assumed.noticed_after if whole_node else 0.0)
        self._plan_failure()

    def _kill(self, replica: _Replica, noticed_after: float) -> None:
        self.outcome.deaths += 1
        leases, replica.leases = list(replica.leases), deque()
        if not replica.is_ready:
            self.outcome.starting += self.now - replica.starts_at
        elif leases:
            self.outcome.slow_or_lost += max(0.0, self.now - replica.computes_since)
        elif replica.idle_since is not None:
            self.outcome.idle += max(0.0, self.now - replica.idle_since)
        self._ready -= replica.is_ready
        replica.is_ready, replica.idle_since = False, None
        for lease in leases:
            returned = functools.partial(self._return, lease.blocks)
            self._push(self.now + noticed_after, returned)
        self._start(replica, noticed_after)

    def _return(self, blocks: list[int]) -> None:
        """Work of a dead replica is lent again, and those that wait for work are woken."""
        self.ledger.give_back(blocks)
        for replica in self._members:
            if replica.is_ready and not replica.leases:
                self._lend_to(replica)

    # ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _at(self, when: float, replica: _Replica, action: Callable[[], None]) -> None:
        epoch = replica.epoch

        def unless_it_died() -> None:
            if replica.epoch == epoch:
                action()

        self._push(when, unless_it_died)

    def _push(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _close(self) -> None:
        """The last answer is in: charge what each replica was doing meanwhile."""
        end = max(self.now, self._driver_free)
        self.outcome.seconds = end
        self.outcome.saving = self.job.tokens * self.job.targets_per_token / self.measured.saved_targets_per_second
        for replica in self._members:
            if not replica.is_ready:
                self.outcome.starting += end - replica.starts_at
            elif replica.leases:
                self.outcome.copied += max(0.0, end - replica.computes_since)
            elif replica.idle_since is not None:
                self.outcome.idle += max(0.0, end - replica.idle_since)
