"""One source, scored by all replicas: cut into pieces of whole batches, whose answers come in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scoremode.core.engine.base import Want
from scoremode.core.engine.batching import prompt_groups
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.core.scores.packing import PackedAnswers
from scoremode.errors import ScoremodeError
from scoremode.remote.ray.pieces import Piece, Piecework, ReplicaHandle
from scoremode.remote.ray.replica_pool import ReplicaPool
from scoremode.remote.ray.scoring_worker import Probed, block_seconds
from scoremode.remote.ray.sent import SentBaseline, WindowSubset, subset_of
from scoremode.values import Bools, Ints

SHARE = 4  # a piece has this part of what is left for each replica: pieces shrink, so that all replicas end together
LEAST_SHARE = 128  # the smallest piece, as a part of all that there is for each replica
MOST_TOKENS = 1 << 20  # the most tokens of a piece: 12 MB to send


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Windows grouped by batch: batch b has the windows ``order[ends[b - 1]:ends[b]]``.

    The grouping follows from the source and the engine alone, so it is the same for any number of replicas.
    """

    order: Ints  # (windows,)
    ends: Ints  # (batches,)
    tokens: Ints  # (batches,) tokens that each batch feeds

    @staticmethod
    def of(source: WindowSource, found: Sequence[Ints] | None) -> Batches:
        """Returns ``found`` as batches. If it is None, windows that share a prompt are a batch, and others one each."""
        found = prompt_groups(source) if found is None else found
        order = np.concatenate([np.zeros(0, np.int64), *found]).astype(np.int64)
        ends = np.cumsum(np.array([len(batch) for batch in found], dtype=np.int64))
        assert len(order) == len(source), "every window is in one batch"
        return Batches(order, ends, _sums(np.asarray(source.lengths)[order], ends))

    def __len__(self) -> int:
        return len(self.ends)

    def windows(self, batch: int) -> Ints:
        return self.order[(int(self.ends[batch - 1]) if batch else 0) : int(self.ends[batch])]

    def pieces(self, done: Bools, sharers: int) -> Iterator[range]:
        """Yields runs of batches in which something is missing, for so many replicas, large ones first."""
        missing = _sums((~done[self.order]).astype(np.int64), self.ends)
        ends = np.cumsum(np.where(missing > 0, np.maximum(self.tokens, 1), 0))
        total, begin, before = int(ends[-1]) if len(ends) else 0, 0, 0
        while before < total:
            share = max((total - before) / SHARE, total / LEAST_SHARE) / max(1, sharers)
            end = min(int(np.searchsorted(ends, before + min(MOST_TOKENS, max(1.0, share)))) + 1, len(ends))
            yield range(begin, end)
            begin, before = end, int(ends[end - 1])


def _sums(values: Ints, ends: Ints) -> Ints:
    """Returns the sum of each group of values; ``ends`` has the end of each group."""
    running = np.concatenate([[0], np.cumsum(values)])
    return np.diff(running[np.concatenate([[0], ends])]).astype(np.int64)


class Scoring(Piecework):
    """The windows of one source. A piece is a run of batches."""

    unit, depth = "window", 2  # the next piece is already there when the first one ends
    fix = "give a smaller --context-length, or replicas with more memory"

    def __init__(
        self,
        pool: ReplicaPool,
        source: WindowSource,
        batches: Batches,
        done: Bools,
        *,
        want: Want,
        probe: WindowSubset,
    ) -> None:
        super().__init__(map(Piece, batches.pieces(done, pool.sharers)), done)
        self.source, self.batches, self.probe = source, batches, probe
        self.want = replace(want, against=None)
        self.against = None if want.against is None else SentBaseline.of(want.against)  # opened by each replica
        self.log, self._replicas = pool.log, len(pool.replicas)
        self._lengths = np.asarray(source.lengths)

    def members(self, number: int) -> Ints:
        return self.batches.windows(number)

    def send(self, replica: ReplicaHandle, piece: Piece) -> Any:
        subset = subset_of(self.source, [self.batches.windows(batch) for batch in piece.numbers])
        piece.windows = subset.indices
        probe = None if replica.is_probed else self.probe
        replica.is_probed = True
        done, oldest = self.done[subset.indices], block_seconds(self._replicas)
        return replica.stream("score", subset, done, self.want, self.against, oldest=oldest, probe=probe)

    def accept(
        self, replica: ReplicaHandle, piece: Piece, said: Probed | PackedAnswers
    ) -> Iterator[tuple[int, Answers]]:
        if isinstance(said, Probed):
            self._compare_probe(replica, said.logprob)
            return
        assert piece.windows is not None, "a piece that was sent"
        for window, answers in said.answers():
            index = int(piece.windows[window])
            if self.done[index]:
                continue
            self.done[index] = True
            replica.stats.windows += 1
            replica.stats.tokens += int(self._lengths[index])
            yield index, answers

    def _compare_probe(self, replica: ReplicaHandle, said: Any) -> None:
        assert self.log.probe is not None, "the probe is chosen before replicas score it"
        if isinstance(said, ScoremodeError):
            self.log.event(f"{replica.name} could not score the probe window: {said.message}", is_detail=True)
            replica.stats.probe_distance = float("nan")
        else:
            replica.stats.probe_distance = self.log.probe.add(said)
