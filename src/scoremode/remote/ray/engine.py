"""An engine that consists of several replicas. Every verb uses it like any other engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.engine.base import SCORES, Baseline, Engine, NoiseFloor, StoredHead, Want
from scoremode.core.scores.answers import Answers, WindowSource, prescribed_batches
from scoremode.remote.ray.replica_log import Probe
from scoremode.remote.ray.replica_pool import ReplicaPool
from scoremode.remote.ray.scoring import Batches, Scoring
from scoremode.remote.ray.sent import WindowLengths, WindowSubset, subset_of
from scoremode.values import Bools, Ints


class ReplicatedEngine(Engine):
    """A model on several replicas. The engine is open as soon as one replica is; the other replicas join later."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._batches: tuple[WindowSource, Batches] | None = None  # the last source and its batches
        self._probe: WindowSubset | None = None
        self._is_accounted = False
        self.pool, self.facts, self.longest = pool, pool.facts, pool.about

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if done.all():
            return
        if self._is_accounted:
            self.pool.log.new_question()
            self._is_accounted = False
        self.pool.show = self.show
        batches = self._batches_of(source)
        if self._probe is None:  # every replica scores this probe when it starts: the first of the longest windows
            window = int(np.argmax(source.lengths))
            self._probe = subset_of(source, [np.array([window], np.int64)])
            self.pool.log.probe = Probe(window)
        yield from self.pool.results(Scoring(self.pool, source, batches, done, want=want, probe=self._probe))
        if want.against is not None:  # the first divergence chooses the kernel that the facts name
            self.facts = self.pool.ask("facts")

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
        found: list[Ints] | None = self.pool.ask("batches", sent)
        return found

    def computes(self, source: WindowSource, done: Bools) -> Bools:
        batches, found = self._batches_of(source), np.zeros(len(source), np.bool_)
        for batch in range(len(batches)):
            windows = batches.windows(batch)
            found[windows] = not done[windows].all()
        return found

    def stored_head(self) -> StoredHead:
        found: StoredHead = self.pool.ask("stored_head")
        return found

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
        batches = self._batches_of(source)
        wanted = [b for b in range(len(batches)) if not done[batches.windows(b)].all()]
        subset = subset_of(source, [batches.windows(b) for b in wanted])
        found: NoiseFloor = self.pool.ask("noise_floor", subset, done[subset.indices])
        return found

    def account(self) -> dict[str, Any]:
        self._is_accounted = True
        return {"replicas": self.pool.log.as_json(), "notes": self.pool.notes()}

    def close(self) -> None:
        self.pool.close()
