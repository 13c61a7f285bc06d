"""Tracks which windows are waiting, assigned or answered, and decides what each replica gets. Does not use Ray.

The windows of a source are grouped into the batches of its engine, by a rule that depends on the source alone. A
replica gets a run of whole batches. Batches of a lost replica go back to the front of the queue. The first answer to a
window counts, and later answers are dropped.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.scores.answers import WindowSource
from scoremode.values import Bools, Ints

ASSIGNED_SECONDS = 8.0  # seconds of work per assignment: enough to keep an engine full that has many windows in flight
LEAST_SECONDS = 0.5  # the least seconds of work per assignment, near the end
FIRST_TOKENS = 2048  # tokens of the first assignment, when the rate of a replica is not known yet
MOST_TOKENS = 1 << 20  # the most tokens of an assignment: 12 MB to send
GROWTH = 4  # an assignment may be this many times the previous one, because a rate measured on little work is uncertain
ALONE_AFTER = 2  # deaths after which a batch is assigned alone, to know which batch causes them
MOST_DEATHS = 3  # replicas that may die while they compute one batch


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Windows grouped by batch: batch b has the windows ``order[ends[b - 1]:ends[b]]``."""

    order: Ints  # (windows,)
    ends: Ints  # (batches,)
    tokens: Ints  # (batches,) tokens that each batch feeds

    @staticmethod
    def of(source: WindowSource, found: Sequence[Ints] | None) -> Batches:
        """Returns ``found`` as batches. If it is None, windows that share a prompt are a batch, and others one each."""
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
        return Batches(order, ends, _sums(np.asarray(source.lengths)[order], ends))

    def __len__(self) -> int:
        return len(self.ends)

    def windows(self, batch: int) -> Ints:
        return self.order[(int(self.ends[batch - 1]) if batch else 0) : int(self.ends[batch])]


def _sums(values: Ints, ends: Ints) -> Ints:
    """Returns the sum of each group of values; ``ends`` has the end of each group."""
    running = np.concatenate([[0], np.cumsum(values)])
    return np.diff(running[np.concatenate([[0], ends])]).astype(np.int64)


@dataclass(slots=True)
class Pace:
    """The speed of one replica, and the size of its last assignment."""

    rate: float | None = None  # tokens per second
    last: int = 0  # tokens

    def measured(self, tokens: int, seconds: float) -> None:
        found = tokens / max(seconds, 1e-6)
        self.rate = found if self.rate is None else 0.5 * self.rate + 0.5 * found


class Ledger:
    """The state of one question: which of its windows are waiting, assigned or answered."""

    def __init__(self, batches: Batches, done: Bools) -> None:
        self.batches = batches
        self.done: Bools = done.copy()
        self._missing = _sums((~done[batches.order]).astype(np.int64), batches.ends)  # unanswered windows of each batch
        self._batch_of: Ints = np.empty(len(done), np.int64)
        self._batch_of[batches.order] = np.repeat(np.arange(len(batches)), np.diff(batches.ends, prepend=0))
        self._returned: deque[int] = deque()  # batches that were assigned before; they are assigned again first
        self._fresh = 0  # the first batch that was never assigned
        self.deaths: Counter[int] = Counter()  # how many replicas died while they computed a batch
        self._refused_by: defaultdict[int, set[str]] = defaultdict(set)  # replicas whose engine failed on a batch
        self.left = int(self._missing.sum())  # windows without an answer
        self.unassigned = int(batches.tokens[self._missing > 0].sum())  # tokens
        self.dropped = 0  # answers to windows that already had an answer

    @property
    def finished(self) -> bool:
        return not self.left

    def unfinished(self, batches: Iterable[int]) -> list[int]:
        return [batch for batch in batches if self._missing[batch]]

    def tokens(self, batches: Iterable[int]) -> int:
        return sum(int(self.batches.tokens[batch]) for batch in batches)

    def missing_windows(self, batches: Iterable[int]) -> int:
        return sum(int(self._missing[batch]) for batch in batches)

    def received(self, window: int) -> bool:
        """Notes that a window was answered. Returns False if it already had an answer."""
        if self.done[window]:
            self.dropped += 1
            return False
        self.done[window] = True
        self._missing[self._batch_of[window]] -= 1
        self.left -= 1
        return True

    def take(self, pace: Pace, sharers: int) -> list[int]:
        """Takes the next batches for a replica from the queue. Returns an empty list if no batch waits."""
        target = self._target(pace, sharers)
        taken: list[int] = []
        tokens = 0
        while (not taken or tokens < target) and (batch := self._first_waiting()) is not None:
            alone = self.deaths[batch] >= ALONE_AFTER
            if alone and taken:
                break
            if self._returned:
                self._returned.popleft()
            else:
                self._fresh += 1
            taken.append(batch)
            tokens += int(self.batches.tokens[batch])
            if alone:
                break
        self.unassigned -= tokens
        pace.last = tokens or pace.last
        return taken

    def _first_waiting(self) -> int | None:
        while self._returned and not self._missing[self._returned[0]]:
            self._returned.popleft()
        if self._returned:
            return self._returned[0]
        while self._fresh < len(self.batches) and not self._missing[self._fresh]:
            self._fresh += 1
        return self._fresh if self._fresh < len(self.batches) else None

    def _target(self, pace: Pace, sharers: int) -> float:
        """Returns how many tokens the next assignment of a replica should have."""
        fair = self.unassigned / (2 * max(1, sharers))  # smaller each time, so that all replicas finish together
        if pace.rate is None:
            return min(FIRST_TOKENS, fair)
        wanted = min(pace.rate * ASSIGNED_SECONDS, GROWTH * max(1, pace.last), fair)
        return min(MOST_TOKENS, max(wanted, pace.rate * LEAST_SECONDS))

    def give_back(self, batches: Sequence[int]) -> list[int]:
        """Puts unfinished batches back to the front of the queue, and returns them."""
        left = self.unfinished(batches)
        self._returned.extendleft(reversed(left))
        self.unassigned += self.tokens(left)
        return left

    def died(self, batches: Sequence[int]) -> int | None:
        """Notes that a replica died while it computed these batches. Returns a batch that killed too many replicas."""
        self.deaths.update(batches)
        if len(batches) == 1 and self.deaths[batches[0]] >= MOST_DEATHS:
            return batches[0]
        return None

    def refused(self, batches: Sequence[int], replica: str) -> bool:
        """Notes that an engine failed on these batches. Returns True if two engines have now failed on one of them."""
        for batch in batches:
            self._refused_by[batch].add(replica)
        return any(len(self._refused_by[batch]) > 1 for batch in batches)
