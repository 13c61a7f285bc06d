"""A run on many replicas, event by event: starts, pieces of work, blocks of answers, failures, and the one driver.

Nothing here is a formula for efficiency. Replicas start, are sent pieces, answer block by block, die and come back as
events on a clock. The pieces are cut by scoremode's own rule (``remote/ray/engine.py``). What is not measured is an
assumption, and is named as one in ``Assumptions``.
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

from scoremode.remote.ray.engine import DEPTH, Batches
from scoremode.remote.ray.replica_pool import AHEAD

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
    jitter: float = 0.03  # standard deviation of a piece's duration, relative
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
    idle: float = 0.0  # nothing was left to do
    waiting_for_driver: float = 0.0
    deaths: int = 0
    driver_busy: float = 0.0
    saving: float = 0.0  # seconds after the last answer, in which no replica is needed

    def share(self, part: float) -> float:
        return part / (self.replicas * self.seconds)

    @property
    def efficiency(self) -> float:
        """Useful seconds of replicas at full speed, of all that were paid for."""
        return self.share(self.useful)


@dataclass
class _Replica:
    rate: float  # of full speed
    node: int
    epoch: int = 0  # an event of an earlier life is void
    pieces: deque[int] = field(default_factory=deque)  # blocks that each of its pieces lacks
    is_ready: bool = False
    computes_since: float = 0.0  # the block that it is at
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
        batches = Batches(every, every + 1, np.full(n, self.job.block_tokens))
        self._waiting = deque(len(piece) for piece in batches.pieces(np.zeros(n, np.bool_), self.replicas))
        self._left = n  # blocks
        self._block_seconds = self.job.block_tokens / self.measured.tokens_per_second  # at full speed
        self._members = [self._replica(i) for i in range(self.replicas)]
        for replica in self._members:
            self._start(replica)
        self._plan_failure()
        while self._left:
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
        replica.is_ready, replica.idle_since = True, self.now
        self._send_to(replica)

    def _send_to(self, replica: _Replica) -> None:
        """As ``remote/ray/replica_pool.py`` does: two pieces at a time."""
        while len(replica.pieces) < DEPTH and self._waiting:
            replica.pieces.append(self._waiting.popleft())
            if len(replica.pieces) == 1:
                begins = self.now
                if replica.idle_since is not None:
                    begins = max(self.now, replica.idle_since)  # it may still wait for the driver
                    self.outcome.idle += begins - replica.idle_since
                    replica.idle_since = None
                self._begin(replica, begins)

    def _begin(self, replica: _Replica, when: float) -> None:
        """The first piece of a replica is computed from now on."""
        noise = max(0.5, self._random.gauss(1.0, self.assumed.jitter))
        replica.seconds_per_block = self._block_seconds / replica.rate * noise
        self._compute(replica, when)

    def _compute(self, replica: _Replica, when: float) -> None:
        replica.computes_since = when
        self._at(when + replica.seconds_per_block, replica, lambda: self._answered(replica))

    def _answered(self, replica: _Replica) -> None:
        """A block is computed: it goes to the driver. A replica that is far ahead of the driver waits for it."""
        replica.pieces[0] -= 1
        self._left -= 1
        taken_at = self._driver_takes()
        self.outcome.useful += self._block_seconds
        self.outcome.slow_or_lost += replica.seconds_per_block - self._block_seconds
        behind = max(0.0, taken_at - self.now - AHEAD * replica.seconds_per_block)
        self.outcome.waiting_for_driver += behind
        when = self.now + behind
        if replica.pieces[0]:
            self._compute(replica, when)
            return
        replica.pieces.popleft()
        if replica.pieces:
            self._begin(replica, when)
        else:
            replica.idle_since = when
        self._at(max(when, taken_at), replica, lambda: self._send_to(replica))

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
        pieces, replica.pieces = list(replica.pieces), deque()
        if not replica.is_ready:
            self.outcome.starting += self.now - replica.starts_at
        elif pieces:
            self.outcome.slow_or_lost += max(0.0, self.now - replica.computes_since)
        elif replica.idle_since is not None:
            self.outcome.idle += max(0.0, self.now - replica.idle_since)
        replica.is_ready, replica.idle_since = False, None
        self._push(self.now + noticed_after, functools.partial(self._return, pieces))
        self._start(replica, noticed_after)

    def _return(self, pieces: list[int]) -> None:
        """Work of a dead replica is sent again, and those that wait for work are woken."""
        self._waiting.extendleft(pieces)
        for replica in self._members:
            if replica.is_ready and not replica.pieces:
                self._send_to(replica)

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
            elif replica.idle_since is not None:
                self.outcome.idle += max(0.0, end - replica.idle_since)
