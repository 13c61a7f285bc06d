"""A model on several replicas that write texts, behind the face of one writer.

A batch of texts goes to one replica at a time. Which texts share a batch follows from the prompts alone, so the texts
do not depend on the number of replicas, nor on which of them wrote what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen
from scoremode.remote.ray.engine import StartedReplicas
from scoremode.remote.ray.replica import ReplicaSpec
from scoremode.remote.ray.replica_pool import Piece, Piecework, ReplicaHandle
from scoremode.remote.ray.spread import Spread
from scoremode.studies.rollouts.writing import (
    DrawingRules,
    Tell,
    Writer,
    WritingRequest,
    WrittenTokens,
    batches_of_texts,
)
from scoremode.values import Bools, Ints

TEXTS = 64  # of a piece, if batches do not matter


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
        for index, text in self._replicas.pool.results(_Writing(asked, done, self.size)):
            tell(len(text.ids))
            yield index, text

    def account(self) -> list[str]:
        found: list[str] = self._replicas.pool.ask("account")
        return [*found, *self._replicas.log.notes()]

    def close(self) -> None:
        self._replicas.close()


class _Writing(Piecework):
    """All texts of one call. A piece is a batch."""

    unit = "text"
    fix = "give fewer --sequences, or replicas with more memory"

    def __init__(self, asked: Sequence[WritingRequest], done: Bools, size: int) -> None:
        self.asked = asked
        self.batches: list[Ints] = batches_of_texts(asked, size or TEXTS)
        unwritten = [Piece([number]) for number, batch in enumerate(self.batches) if not done[batch].all()]
        super().__init__(unwritten, done)

    def members(self, number: int) -> Ints:
        return self.batches[number]

    def send(self, replica: ReplicaHandle, piece: Piece) -> Any:
        batch = self.batches[piece.numbers[0]]
        asked = [self.asked[place] for place in batch.tolist()]
        return replica.actor.write.options(num_returns="streaming").remote(asked, self.done[batch])

    def accept(
        self, replica: ReplicaHandle, piece: Piece, said: tuple[int, WrittenTokens]
    ) -> Iterator[tuple[int, WrittenTokens]]:
        place, text = said
        index = int(self.batches[piece.numbers[0]][place])
        if not self.done[index]:
            self.done[index] = True
            replica.stats.windows += 1
            replica.stats.tokens += len(text.ids)
            yield index, text
