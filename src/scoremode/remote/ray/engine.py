"""An engine that consists of several replicas. Every verb uses it like any other engine."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.disk.folders import PLACE
from scoremode.core.engine.base import SCORES, Baseline, Engine, NoiseFloor, StoredHead, Want
from scoremode.core.engine.baseline import StoredBaseline
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen
from scoremode.core.scores.answers import Answers, WindowSource, prescribed_batches
from scoremode.errors import EngineError, OptionError
from scoremode.remote.ray.ray_cluster import Cluster, require_ray
from scoremode.remote.ray.replica import Opened, ReplicaSpec, SentBaseline, WindowLengths, WindowSubset, subset_of
from scoremode.remote.ray.replica_log import Probe, ReplicaLog
from scoremode.remote.ray.replica_pool import ReplicaPool
from scoremode.remote.ray.scoring import Batches, Scoring
from scoremode.remote.ray.spread import Spread, room_for
from scoremode.values import Bools, Ints


def check_spread(chosen: Chosen, spread: Spread) -> Chosen:
    """Checks, before a text is read, that an engine can run as replicas; returns it with the options of one replica."""
    if not chosen.plugin.able().replicas:
        raise OptionError(f"the {chosen.plugin.name} engine cannot run as replicas", fix="leave --replicas out")
    require_ray()
    room_for(spread, chosen.plugin, chosen.options)
    return replace(chosen, options=chosen.plugin.placement(chosen.options).replica_options or chosen.options)


def require_alone(spread: Spread | None) -> None:
    """Refuses replicas if two models must run in one process, window by window."""
    if spread is not None:
        raise EngineError(
            "replicas cannot run beside another open model",
            fix='make a reference of the baseline first: baseline.reference("ref/", corpus=…)',
        )


def environment_of(spread: Spread) -> dict[str, str]:
    """Returns the variable for as many threads per replica as here: the bits of a CPU's sums depend on the number."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if not threads and spread.cpus_per_replica is not None and spread.cpus_per_replica >= 1:
        threads = str(int(spread.cpus_per_replica))
    elif not threads and "torch" in sys.modules:
        threads = str(sys.modules["torch"].get_num_threads())
    return {"OMP_NUM_THREADS": threads} if threads else {}


class StartedReplicas:
    """The replicas of a model, of which at least one is open; the other replicas join later."""

    def __init__(
        self,
        chosen: Chosen,
        spec: ReplicaSpec,
        spread: Spread,
        tell: Callable[[str], None] | None,
        say: Callable[[str], None] | None,
    ) -> None:
        """``tell`` receives how many replicas are ready; ``say`` receives lines that a user should see."""
        self._pool: ReplicaPool | None = None
        room = room_for(spread, chosen.plugin, chosen.options)
        self._cluster = Cluster(spread, room)
        try:
            self.log = ReplicaLog(spread.replicas, self._cluster.address)
            if say is not None:
                self.log.say = say
            self._pool = ReplicaPool(self._cluster, spec, room, environment_of(spread), self.log)
            self._pool.show = tell
            first = self._pool.wait_for_one().opened
        except BaseException:
            self.close()
            raise
        assert first is not None
        self.first: Opened = first

    @property
    def pool(self) -> ReplicaPool:
        assert self._pool is not None, "closed"
        return self._pool

    def close(self) -> None:
        """Ends the replicas, and Ray if it was started for them."""
        pool, self._pool = self._pool, None
        try:
            if pool is not None:
                pool.close()
        finally:
            self._cluster.close()


class ReplicatedEngine(Engine):
    """A model on several replicas. The engine is open as soon as one replica is; the other replicas join later."""

    def __init__(
        self,
        chosen: Chosen,
        work: Work,
        spread: Spread,
        tokenizer: str | None = None,
        *,
        tell: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``tell`` and ``say`` are those of ``StartedReplicas``."""
        self._batches: tuple[Any, Batches] | None = None  # the last source and its batches
        self._probe: WindowSubset | None = None
        self._is_accounted = False
        self._replicas = StartedReplicas(chosen, ReplicaSpec.of(chosen, tokenizer, work), spread, tell, say)
        self._log = self._replicas.log
        self.facts, self.longest = self._replicas.first.facts, self._replicas.first.longest

    @property
    def pool(self) -> ReplicaPool:
        return self._replicas.pool

    def wait_for_all(self, seconds: float = 300.0) -> int:
        """Waits until every replica is ready or left out; returns how many are ready. Scoring need not wait."""
        return self.pool.wait_for_all(seconds)

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if done.all():
            return
        if self._is_accounted:
            self._log.new_question()
            self._is_accounted = False
        batches = self._batches_of(source)
        if self._probe is None:  # every replica scores this probe when it starts: the first of the longest windows
            window = int(np.argmax(source.lengths))
            self._probe = subset_of(source, [np.array([window], np.int64)])
            self._log.probe = Probe(window)
        yield from self.pool.results(Scoring(self.pool, source, batches, done, want=want, probe=self._probe))
        if want.against is not None:  # the first divergence chooses the kernel that the facts name
            self.facts = self.pool.ask("facts")

    def _batches_of(self, source: WindowSource) -> Batches:
        if self._batches is not None and self._batches[0]() is source:
            return self._batches[1]
        found = Batches.of(source, self.batches(source))
        try:
            self._batches = weakref.ref(source), found
        except TypeError:  # the source does not support weak references
            self._batches = None
        return found

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
        # the work folder of a reference that goes to a URI cannot be read by other machines
        unread = isinstance(baseline, StoredBaseline) and (baseline.stored.folder / PLACE).exists()
        place, batches = None if unread else SentBaseline.of(baseline), self._batches_of(source)
        wanted = [b for b in range(len(batches)) if not done[batches.windows(b)].all()]
        subset = subset_of(source, [batches.windows(b) for b in wanted])
        found: NoiseFloor = self.pool.ask("noise_floor", place, subset, done[subset.indices])
        return found

    def account(self) -> dict[str, Any]:
        self._is_accounted = True
        return {"replicas": self._log.as_json(), "notes": self._log.notes()}

    def close(self) -> None:
        self._replicas.close()
