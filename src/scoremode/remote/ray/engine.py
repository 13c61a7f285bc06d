"""An engine that consists of several replicas. Every verb uses it like any other engine.

A source is cut into pieces of whole batches. Each replica has two pieces at a time, and answers come in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scoremode.core.engine.base import SCORES, Engine, FinalStates, NoiseFloor, StoredHead, Wanted
from scoremode.core.engine.batching import prompt_groups
from scoremode.core.scores.answers import Answers, WindowSource, prescribed_batches
from scoremode.core.verbs.replicas import Pieces
from scoremode.remote.ray.packing import PackedAnswers
from scoremode.remote.ray.replica import SealedPath, WindowLengths, WindowSubset, block_seconds, subset_of
from scoremode.remote.ray.replica_pool import ReplicaPool
from scoremode.values import Bools, Ints

SHARE = 4  # a piece has this part of what is left for each replica: pieces shrink, so that all replicas end together
LEAST_SHARE = 128  # the smallest piece, as a part of all that there is for each replica
MOST_TOKENS = 1 << 20  # the most tokens of a piece: 12 MB to send
DEPTH = 2  # pieces of a replica: the next one is already there when the first one ends
FIX = "give a smaller --context-length, or replicas with more memory"


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Windows grouped by batch: batch b has the windows ``order[ends[b - 1]:ends[b]]``.

    The grouping follows from the source and the engine alone, so it is the same for any number of replicas.
    """

    order: Ints  # (windows,)
    ends: Ints  # (batches,)
    tokens: Ints  # (batches,) tokens that each batch feeds

    @staticmethod
    def of(source: WindowSource, groups: Sequence[Ints] | None) -> Batches:
        """Returns ``groups`` as batches. If it is None, windows that share a prompt are a batch, others one each."""
        groups = prompt_groups(source) if groups is None else groups
        order = np.concatenate([np.zeros(0, np.int64), *groups]).astype(np.int64)
        ends = np.cumsum(np.array([len(batch) for batch in groups], dtype=np.int64))
        assert len(order) == len(source), "every window is in one batch"
        return Batches(order, ends, _sums(np.asarray(source.lengths)[order], ends))

    def __len__(self) -> int:
        return len(self.ends)

    def windows(self, batches: range) -> Ints:
        """The windows of some batches, one after the other."""
        return self.order[int(self.ends[batches.start - 1]) if batches.start else 0 : int(self.ends[batches.stop - 1])]

    def each(self, batches: range | None = None) -> list[Ints]:
        chosen = range(len(self)) if batches is None else batches
        return [self.windows(range(batch, batch + 1)) for batch in chosen]

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


class ReplicatedEngine(Engine):
    """A model on several replicas. The engine is open as soon as one replica is; the other replicas join later."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._batches: tuple[WindowSource, Batches] | None = None  # the last source and its batches
        self._is_accounted = False
        self.pool, self.facts, self.longest = pool, pool.facts, pool.about

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if done.all():
            return
        if self._is_accounted:
            self.pool.new_question()
            self._is_accounted = False
        self.pool.show = self.show
        yield from self.pool.share(self._pieces(source, done, want), done)
        if want.against is not None:  # the first divergence chooses the kernel that the facts name
            self.facts = self.pool.ask("facts")

    def _pieces(self, source: WindowSource, done: Bools, want: Wanted) -> Pieces:
        batches = self._batches_of(source)
        pieces = list(batches.pieces(done, self.pool.sharers))
        against = None if want.against is None else SealedPath.of(want.against)  # opened by each replica
        bare, oldest = replace(want, against=None), block_seconds(len(self.pool.replicas))

        def arguments(number: int, done: Bools) -> tuple[Any, ...]:
            subset = subset_of(source, batches.each(pieces[number]))
            return subset, done[subset.indices], bare, against, oldest

        members = [batches.windows(piece) for piece in pieces]
        return Pieces("window", FIX, "score", members, arguments, PackedAnswers.answers, DEPTH)

    def _batches_of(self, source: WindowSource) -> Batches:
        if self._batches is None or self._batches[0] is not source:
            self._batches = source, Batches.of(source, self.batches(source))
        return self._batches[1]

    def batches(self, source: WindowSource) -> list[Ints] | None:
        """Returns the windows of each batch. A replica finds them, because the engine's rule depends on the model."""
        prescribed = prescribed_batches(source)
        if prescribed is not None:
            return prescribed
        sent: WindowSubset | WindowLengths = WindowLengths(np.asarray(source.lengths), source.vocabulary)
        if source.prefix_group is not None:
            sent = replace(subset_of(source, [np.arange(len(source))]), batch_ends=None)
        batches: list[Ints] | None = self.pool.ask("batches", sent)
        return batches

    def stored_head(self) -> StoredHead:
        head: StoredHead = self.pool.ask("stored_head")
        return head

    def noise_floor(self, baseline: FinalStates, source: WindowSource, done: Bools) -> NoiseFloor:
        subset = subset_of(source, [batch for batch in self._batches_of(source).each() if not done[batch].all()])
        floor: NoiseFloor = self.pool.ask("noise_floor", subset, done[subset.indices])
        return floor

    def account(self) -> dict[str, Any]:
        self._is_accounted = True
        return {"replicas": self.pool.as_json(), "notes": self.pool.notes()}

    def close(self) -> None:
        self.pool.close()
