"""A model on several replicas that write texts, behind the face of one writer.

A batch of texts goes to one replica at a time. Which texts share a batch follows from the prompts alone, so the texts
do not depend on the number of replicas, nor on which of them wrote what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scoremode.cluster.engine import StartedReplicas
from scoremode.cluster.replica import Finished, ReplicaSpec
from scoremode.cluster.replica_pool import RESUME, Assignment, Lost, ReplicaHandle, ReplicaPool
from scoremode.cluster.retries import Retries
from scoremode.cluster.spread import Spread
from scoremode.engines.plugin import Work
from scoremode.engines.registry import Chosen
from scoremode.engines.writing import DrawingRules, Tell, Writer, WritingRequest, WrittenTokens, batches_of_texts
from scoremode.errors import EngineError, ScoremodeError
from scoremode.values import Bools, Ints

TEXTS = 64  # of an assignment, if batches do not matter


class ReplicatedWriter(Writer):
    """A model on several replicas. The writer is open as soon as one replica is."""

    def __init__(
        self,
        chosen: Chosen,
        work: Work,
        spread: Spread,
        rules: DrawingRules,
        tokenizer: str | None = None,
        *,
        tell: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``tell`` and ``say`` are those of ``StartedReplicas``."""
        self._replicas = StartedReplicas(chosen, ReplicaSpec.of(chosen, tokenizer, work, rules), spread, tell, say)
        writes = self._replicas.first.writes
        assert writes is not None, "a replica that was opened to write"
        self.facts = self._replicas.first.facts
        self.ends, self.size, self.missing = writes.ends, writes.size, writes.missing

    def write(self, asked: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        if done.all():
            return
        yield from _Question(self._replicas.pool, asked, done, self.size).texts(tell)

    def account(self) -> list[str]:
        found: list[str] = self._replicas.pool.ask("account")
        return [*found, *self._replicas.log.notes()]

    def close(self) -> None:
        self._replicas.close()


class _Question:
    """All texts of one call: batches that wait, and those that replicas write."""

    def __init__(self, pool: ReplicaPool, asked: Sequence[WritingRequest], done: Bools, size: int) -> None:
        self.pool, self.asked, self.done = pool, asked, done.copy()
        self.batches: list[Ints] = batches_of_texts(asked, size or TEXTS)
        unwritten = (number for number, batch in enumerate(self.batches) if not done[batch].all())
        fix = f"give fewer --sequences, or replicas with more memory; {RESUME}"
        self.retries = Retries(pool, unwritten, what="texts", fix=fix)

    def texts(self, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        try:
            while not self.done.all():
                for replica in self.pool.ready:
                    if not replica.assignments and self.retries.waiting:
                        self._send(replica, self.retries.waiting.popleft())
                for replica, _, result in self.pool.poll():
                    for number, text in self._handle(replica, result):
                        tell(len(text.ids))
                        yield number, text
        finally:
            for replica in self.pool.replicas:
                replica.assignments.clear()

    def _send(self, replica: ReplicaHandle, number: int) -> None:
        batch = self.batches[number]
        asked = [self.asked[place] for place in batch.tolist()]
        stream = replica.actor.write.options(num_returns="streaming").remote(asked, self.done[batch])
        tokens = sum(one.room for one in asked)
        replica.assignments.append(Assignment([number], None, tokens, stream, time.monotonic()))

    def _handle(self, replica: ReplicaHandle, result: Any) -> Iterator[tuple[int, WrittenTokens]]:
        number = replica.assignments[0].batches[0] if replica.assignments else None
        if number is None or isinstance(result, Lost | ScoremodeError):
            self.retries.failed(replica, number, result)
            return
        match result:
            case Finished():
                ended = replica.assignments.popleft()
                replica.pace.measured(ended.tokens, result.seconds)
                replica.stats.seconds += result.seconds
                if not self.done[self.batches[number]].all():
                    raise EngineError("the engine left texts unwritten", fix="run it again")
            case (int() as place, WrittenTokens() as text):
                replica.failures = 0
                index = int(self.batches[number][place])
                if not self.done[index]:
                    self.done[index] = True
                    replica.stats.windows += 1
                    replica.stats.tokens += len(text.ids)
                    yield index, text
            case _:
                raise AssertionError(f"a replica said {result!r}")
