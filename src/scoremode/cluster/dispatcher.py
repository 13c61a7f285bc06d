"""Scores one source with all replicas: assigns batches, accepts answers in any order, yields each window once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.cluster.ledger import Ledger
from scoremode.cluster.replica import Finished, SentBaseline, WindowSubset, block_seconds, subset_of
from scoremode.cluster.replica_pool import RESUME, Assignment, Lost, ReplicaHandle, ReplicaPool
from scoremode.engines.base import Want
from scoremode.errors import EngineError, InputError, ScoremodeError
from scoremode.scores.answers import Answers, WindowSource
from scoremode.scores.packing import PackedAnswers

DEPTH = 2  # assignments per replica, so that the next one is already there when the first one ends
LATE, GRACE = 1.5, 1.0  # an assignment is late after LATE times its expected seconds plus GRACE seconds
BLOCKS_AHEAD = 8  # blocks of answers of one replica that may wait to be read


class Dispatcher:
    """Scores the windows of one source with all replicas of a pool."""

    def __init__(
        self,
        pool: ReplicaPool,
        source: WindowSource,
        ledger: Ledger,
        *,
        want: Want,
        probe: WindowSubset,
    ) -> None:
        self.pool, self.source, self.ledger = pool, source, ledger
        self.want = replace(want, against=None)
        self.against = None if want.against is None else SentBaseline.of(want.against)  # opened by each replica
        self.probe, self.log = probe, pool.log
        self._nan_windows: set[int] = set()  # windows for which a replica gave NaN
        self._lengths = np.asarray(source.lengths)

    def answers(self) -> Iterator[tuple[int, Answers]]:
        try:
            while not self.ledger.finished:
                for replica in self.pool.ready:
                    self._assign_work(replica)
                for replica, method, result in self.pool.poll():
                    yield from self._handle(replica, method, result)
                    self._assign_work(replica)  # before other results are handled, because this replica may be idle
        finally:
            self.log.counts["dropped"] += self.ledger.dropped
            for replica in self.pool.replicas:  # nobody reads the remaining answers; replicas finish their current work
                replica.assignments.clear()

    def _handle(self, replica: ReplicaHandle, method: str, result: Any) -> Iterator[tuple[int, Answers]]:
        match result:
            case Lost():
                self._reassign_after_death(replica, result.why)
            case _ if method == "probe":
                self._compare_probe(replica, result)
            case PackedAnswers():
                yield from self._accept(replica, result)
            case Finished():
                self._finish(replica, result)
            case ScoremodeError():
                self._reassign_after_error(replica, result)
            case _:
                raise AssertionError(f"a replica said {result!r}")

    # ── work for replicas ────────────────────────────────────────────────────────────────────────────────────────────
    def _assign_work(self, replica: ReplicaHandle) -> None:
        if not replica.is_ready:
            return
        if not replica.is_probed:
            replica.is_probed = True
            replica.calls["probe"] = replica.actor.probe.remote(self.probe)
        while len(replica.assignments) < DEPTH:
            if replica.assignments and replica.pace.rate is None:
                return  # the rate of the first assignment decides the size of the next one
            batches = self.ledger.take(replica.pace, self.pool.sharers)
            if not batches:
                break
            self._send(replica, batches)
        if not replica.assignments:
            self._copy_late_work(replica)

    def _send(self, replica: ReplicaHandle, batches: list[int]) -> Assignment:
        subset = subset_of(self.source, [self.ledger.batches.windows(batch) for batch in batches])
        method = replica.actor.score.options(num_returns="streaming", _generator_backpressure_num_objects=BLOCKS_AHEAD)
        done, oldest = self.ledger.done[subset.indices], block_seconds(len(self.pool.replicas))
        stream = method.remote(subset, done, self.want, self.against, oldest)
        sent = Assignment(batches, subset, self.ledger.tokens(batches), stream, time.monotonic())
        replica.assignments.append(sent)
        return sent

    def _copy_late_work(self, idle: ReplicaHandle) -> None:
        """Assigns the oldest late work to an idle replica as well, if no batch waits. The first answer counts."""
        rates = [other.pace.rate for other in self.pool.ready if other.pace.rate is not None]
        if not rates:
            return
        rate = idle.pace.rate or statistics.median(rates)
        now = time.monotonic()
        late = [
            (one.sent, one, other)
            for other in self.pool.ready
            for one in other.assignments
            if other is not idle and not one.is_copied and now - one.sent > GRACE + LATE * one.tokens / rate
        ]
        if not late:
            return
        _, assignment, slow = min(late, key=lambda found: found[0])
        assignment.is_copied = True
        left = self.ledger.unfinished(assignment.batches)
        if left:
            self.log.counts["copies"] += 1
            self.log.event(f"{idle.name} computes what {slow.name} has not finished, too", is_detail=True)
            self._send(idle, left).is_copied = True

    # ── answers of replicas ──────────────────────────────────────────────────────────────────────────────────────────
    def _accept(self, replica: ReplicaHandle, block: PackedAnswers) -> Iterator[tuple[int, Answers]]:
        replica.failures = 0
        subset = replica.assignments[0].subset
        assert subset is not None
        indices = subset.indices
        for window, answers in block.answers():
            index = int(indices[window])
            if self._is_first_nan(replica, index, answers) or not self.ledger.received(index):
                continue
            self._remember_probe(index, answers)
            replica.stats.windows += 1
            replica.stats.tokens += int(self._lengths[index])
            yield index, answers

    def _is_first_nan(self, replica: ReplicaHandle, index: int, answers: Answers) -> bool:
        """Is this a window's first answer with NaN? A broken device may be the cause, so the window is scored again."""
        if index in self._nan_windows or len(self.pool.replicas) == 1 or not np.isnan(answers.logprob).any():
            return False
        self._nan_windows.add(index)
        self.log.event(f"{replica.name} gave NaN in window {index}, which is scored once more")
        return True

    def _remember_probe(self, index: int, answers: Answers) -> None:
        """Stores the probe window's scores from a batch. Its scores alone differ from them by the noise of a rerun."""
        probe = self.log.probe
        if probe is None or index != probe.window or probe.in_run is not None:
            return
        if np.array_equal(self.source.window(index).ids, self.probe.window(0).ids):  # else it is of another question
            probe.in_run = np.array(answers.logprob, np.float64).reshape(-1)

    def _finish(self, replica: ReplicaHandle, said: Finished) -> None:
        ended = replica.assignments.popleft()
        replica.pace.measured(ended.tokens, said.seconds)
        replica.stats.seconds += said.seconds
        copied: set[int] = set()
        if ended.is_copied:
            copied = {batch for one in self.pool.replicas for other in one.assignments for batch in other.batches}
        left = self.ledger.give_back([batch for batch in ended.batches if batch not in copied])
        unanswered = [b for b in left if not self._nan_windows & set(self.ledger.batches.windows(b).tolist())]
        if unanswered and self.ledger.refused(unanswered, f"{replica.incarnation} {ended.sent}"):
            window = int(self.ledger.batches.windows(unanswered[0])[0])
            raise EngineError(f"the engine left window {window} without an answer", fix="run it again")

    def _reassign_after_error(self, replica: ReplicaHandle, said: ScoremodeError) -> None:
        """Gives the windows of a failed engine to other replicas. Raises the error if a second engine fails on them."""
        left = self._give_all_back(replica)
        if isinstance(said, InputError) or self.ledger.refused(left, replica.incarnation):
            raise said
        self.log.event(f"the engine of {replica.name} failed: {said.message}; its windows go to others")
        self.pool.replace(replica, "its engine failed again and again")

    def _reassign_after_death(self, replica: ReplicaHandle, why: str) -> None:
        node_lost = self.pool.is_node_lost(replica)
        running = self.ledger.unfinished(replica.assignments[0].batches) if replica.assignments else []
        left = self._give_all_back(replica)
        again = f"; {self.ledger.missing_windows(left)} windows go to others" if left else ""
        self.log.event(f"{replica.name} is gone ({'its node is gone' if node_lost else why}){again}")
        self.pool.replace(replica, why)
        fatal = self.ledger.died(running) if running and not node_lost else None
        if fatal is not None:
            raise EngineError(
                f"three replicas died while they scored window {int(self.ledger.batches.windows(fatal)[0])} ({why})",
                fix=f"give a smaller --context-length, or replicas with more memory; {RESUME}",
            )

    def _give_all_back(self, replica: ReplicaHandle) -> list[int]:
        left: list[int] = []
        for assignment in reversed(replica.assignments):
            left = self.ledger.give_back(assignment.batches) + left
        self.log.counts["windows again"] += self.ledger.missing_windows(left)
        return left

    def _compare_probe(self, replica: ReplicaHandle, said: Any) -> None:
        assert self.log.probe is not None, "the probe is chosen before replicas score it"
        if isinstance(said, ScoremodeError):
            self.log.event(f"{replica.name} could not score the probe window: {said.message}", is_detail=True)
            replica.stats.probe_distance = float("nan")
        else:
            replica.stats.probe_distance = self.log.probe.add(said)
