"""Which windows are waiting, assigned or answered. Knows nothing of Ray: what each replica gets is decided here.

The windows of a source are grouped into the batches of its engine, by a rule that depends on the source alone. A
replica gets a run of whole batches. Batches of a lost replica go back to the front of the queue. The first answer to a
window counts; later ones are dropped.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.plan.windows import WindowSource
from scoremode.values import Bools, Ints

ASSIGNED_SECONDS = 8.0  # of work: enough to keep an engine full that has many windows in flight
LEAST_SECONDS = 0.5  # of work, towards the end
FIRST_TOKENS = 2048  # of a replica whose rate is not known yet
MOST_TOKENS = 1 << 20  # of an assignment: 12 MB on their way
GROWTH = 4  # the next assignment may be this many times the last: a rate measured on little work is uncertain
ALONE_AFTER = 2  # deaths after which a batch is assigned alone, to know which batch it is
MOST_DEATHS = 3  # replicas that may die of one batch


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Windows batch by batch: batch b has the windows ``order[ends[b - 1]:ends[b]]``."""

    order: Ints  # (windows,)
    ends: Ints  # (batches,)
    tokens: Ints  # (batches,) fed by each

    @staticmethod
    def of(source: WindowSource, found: Sequence[Ints] | None) -> Batches:
        """The batches ``found``; if that is None, each batch is one window, or all windows that share a prompt."""
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
    """The sum of each group of values; ``ends`` says where each group ends."""
    running = np.concatenate([[0], np.cumsum(values)])
    return np.diff(running[np.concatenate([[0], ends])]).astype(np.int64)


@dataclass(slots=True)
class Pace:
    """How fast one replica is, and how large its last assignment was."""

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
        self._missing = _sums((~done[batches.order]).astype(np.int64), batches.ends)  # windows of each batch
        self._batch_of: Ints = np.empty(len(done), np.int64)
        self._batch_of[batches.order] = np.repeat(np.arange(len(batches)), np.diff(batches.ends, prepend=0))
        self._returned: deque[int] = deque()  # batches that were assigned before; they come first
        self._fresh = 0  # the first batch that was never assigned
        self.deaths: Counter[int] = Counter()  # of replicas that were computing a batch
        self._refused_by: defaultdict[int, set[str]] = defaultdict(set)  # replicas whose engine failed on a batch
        self.left = int(self._missing.sum())  # windows without an answer
        self.unassigned = int(batches.tokens[self._missing > 0].sum())  # tokens
        self.dropped = 0  # answers to windows that had one

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
        """Notes that a window was answered; False if it had an answer already."""
        if self.done[window]:
            self.dropped += 1
            return False
        self.done[window] = True
        self._missing[self._batch_of[window]] -= 1
        self.left -= 1
        return True

    def take(self, pace: Pace, sharers: int) -> list[int]:
        """Takes the next batches for a replica from the queue; an empty list if no batch waits."""
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
        """How many tokens the next assignment of a replica should have."""
        fair = self.unassigned / (2 * max(1, sharers))  # ever smaller, so that all finish together
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
        """Notes that a replica died while it computed these batches; returns a batch that killed too many replicas."""
        self.deaths.update(batches)
        if len(batches) == 1 and self.deaths[batches[0]] >= MOST_DEATHS:
            return batches[0]
        return None

    def refused(self, batches: Sequence[int], replica: str) -> bool:
        """Notes that an engine failed on these batches; True if this is the second engine to fail on one of them."""
        for batch in batches:
            self._refused_by[batch].add(replica)
        return any(len(self._refused_by[batch]) > 1 for batch in batches)
