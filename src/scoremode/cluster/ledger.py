"""Which windows are waiting, leased or answered. Knows nothing of Ray: every rule of who gets what is decided here.

A source is cut into the batches of its engine, by the source alone. A lease is a run of whole batches. Whatever is lost
goes back to the front of the queue; an answer counts once, whoever gives it first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scoremode.plan.windows import WindowSource
from scoremode.values import Bools, Ints

LEASE_SECONDS = 8.0  # of work: enough to keep an engine full that has many windows in flight
LEAST_SECONDS = 0.5  # of work, towards the end
FIRST_TOKENS = 2048  # of a replica whose rate is not known yet
MOST_TOKENS = 1 << 20  # of a lease: 12 MB on their way
GROWTH = 4  # the next lease may be this many times the last: a rate that was measured on little says little
ALONE_AFTER = 2  # losses after which a batch is leased alone, to know which one it is
MOST_LOSSES = 3  # replicas that may die of one batch


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Windows batch by batch: batch b has the windows ``order[ends[b - 1]:ends[b]]``."""

    order: Ints  # (windows,)
    ends: Ints  # (batches,)
    tokens: Ints  # (batches,) fed by each

    @staticmethod
    def of(source: WindowSource, found: Sequence[Ints] | None) -> Batches:
        """``found`` None: each window alone, or with those that share its prompt."""
        lengths = np.asarray(source.lengths)
        if found is not None:
            order = np.concatenate(found).astype(np.int64) if len(found) else np.zeros(0, np.int64)
            ends = np.cumsum(np.array([len(batch) for batch in found], dtype=np.int64))
        elif source.prefix_group is None:
            order = np.arange(len(source), dtype=np.int64)
            ends = order + 1
        else:
            order = np.argsort(source.prefix_group, kind="stable").astype(np.int64)
            edges = np.flatnonzero(np.diff(np.asarray(source.prefix_group)[order])) + 1
            ends = np.append(edges, len(order)).astype(np.int64)
        assert len(order) == len(source), "every window is in one batch"
        running = np.concatenate([[0], np.cumsum(lengths[order])])
        tokens = np.diff(running[np.concatenate([[0], ends])])
        return Batches(order, ends, tokens.astype(np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def windows(self, batch: int) -> Ints:
        return self.order[(int(self.ends[batch - 1]) if batch else 0) : int(self.ends[batch])]


@dataclass(slots=True)
class Pace:
    """How fast one replica is, and how large its last lease was."""

    rate: float | None = None  # tokens per second
    last: int = 0  # tokens

    def measured(self, tokens: int, seconds: float) -> None:
        found = tokens / max(seconds, 1e-6)
        self.rate = found if self.rate is None else 0.5 * self.rate + 0.5 * found


@dataclass(slots=True)
class Losses:
    """What happened to one batch."""

    deaths: int = 0  # of replicas that were computing it
    refused_by: set[str] = field(default_factory=set)  # replicas whose engine gave an error


class Ledger:
    """The state of one question."""

    def __init__(self, batches: Batches, done: Bools) -> None:
        self.batches = batches
        self.done: Bools = done.copy()
        missing = (~done[batches.order]).astype(np.int64)
        running = np.concatenate([[0], np.cumsum(missing)])
        self._missing: Ints = np.diff(running[np.concatenate([[0], batches.ends])])
        self._batch_of: Ints = np.empty(len(done), np.int64)
        self._batch_of[batches.order] = np.repeat(np.arange(len(batches)), np.diff(batches.ends, prepend=0))
        self._queue: deque[tuple[int, int]] = deque([(0, len(batches))] if len(batches) else [])
        self._losses: dict[int, Losses] = {}
        self.left = int(self._missing.sum())  # windows without an answer
        self.unleased = int(batches.tokens[self._missing > 0].sum())  # tokens that nobody has
        self.dropped = 0  # answers that somebody had given before

    @property
    def finished(self) -> bool:
        return not self.left

    def is_open(self, batch: int) -> bool:
        return bool(self._missing[batch])

    def unfinished(self, batches: Iterable[int]) -> list[int]:
        return [batch for batch in batches if self._missing[batch]]

    def tokens(self, batches: Iterable[int]) -> int:
        return int(sum(int(self.batches.tokens[batch]) for batch in batches))

    def received(self, window: int) -> bool:
        """Note an answer; False if there is one already."""
        if self.done[window]:
            self.dropped += 1
            return False
        self.done[window] = True
        self._missing[self._batch_of[window]] -= 1
        self.left -= 1
        return True

    def take(self, pace: Pace, sharers: int) -> list[int]:
        """Batches for a replica, in the order of the queue; none if nothing waits."""
        target = self._target(pace, sharers)
        found: list[int] = []
        tokens = 0
        while self._queue and (not found or tokens < target):
            begin, end = self._queue.popleft()
            while begin < end and (not found or tokens < target):
                if not self._missing[begin]:
                    begin += 1
                    continue
                alone = begin in self._losses and self._losses[begin].deaths >= ALONE_AFTER
                if alone and found:
                    break
                found.append(begin)
                tokens += int(self.batches.tokens[begin])
                begin += 1
                if alone:
                    target = 0
            if begin < end:
                self._queue.appendleft((begin, end))
                if found:
                    break
        self.unleased -= tokens
        pace.last = tokens or pace.last
        return found

    def _target(self, pace: Pace, sharers: int) -> float:
        fair = self.unleased / (2 * max(1, sharers))  # ever smaller, so that all finish together
        if pace.rate is None:
            return min(FIRST_TOKENS, fair)
        wanted = min(pace.rate * LEASE_SECONDS, GROWTH * max(1, pace.last), fair)
        return min(MOST_TOKENS, max(wanted, pace.rate * LEAST_SECONDS))

    def give_back(self, batches: Sequence[int]) -> list[int]:
        """Put what is unfinished back to the front; the batches that were."""
        left = self.unfinished(batches)
        for batch in reversed(left):
            if self._queue and self._queue[0][0] == batch + 1:
                self._queue[0] = (batch, self._queue[0][1])
            else:
                self._queue.appendleft((batch, batch + 1))
        self.unleased += self.tokens(left)
        return left

    def died(self, batches: Sequence[int]) -> int | None:
        """A replica died while it computed these; the batch that this happened to too often, if there is one."""
        for batch in batches:
            self._losses.setdefault(batch, Losses()).deaths += 1
        if len(batches) == 1 and self._losses[batches[0]].deaths >= MOST_LOSSES:
            return batches[0]
        return None

    def refused(self, batches: Sequence[int], replica: str) -> bool:
        """An engine gave an error on these; did another one, too, on one of them?"""
        again = False
        for batch in batches:
            losses = self._losses.setdefault(batch, Losses())
            losses.refused_by.add(replica)
            again |= len(losses.refused_by) > 1
        return again
