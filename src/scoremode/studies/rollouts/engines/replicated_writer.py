"""A model on several replicas that write texts, behind the face of one writer.

A batch of texts goes to one replica at a time. Which texts share a batch follows from the prompts alone, so the texts
do not depend on the number of replicas, nor on which of them wrote what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen, open_for
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.replicas import Pieces, Replicas, Worker
from scoremode.studies.rollouts.writing import (
    DrawingRules,
    Tell,
    Writer,
    WritingRequest,
    WrittenTokens,
    batches_of_texts,
)
from scoremode.values import Bools

TEXTS = 64  # of a piece, if batches do not matter


def open_writing(rules: DrawingRules, chosen: Chosen, work: Work) -> Worker:
    writer: Writer = open_for(chosen, "writes", work, rules)
    return Worker(writer, writer.facts, (writer.ends, writer.size, writer.missing))


def _ignore(tokens: int) -> None:
    """The driver counts the tokens of whole texts."""


class ReplicatedWriter(Writer):
    """A model on several replicas. The writer is open as soon as one replica is."""

    def __init__(self, replicas: Replicas, work: Work, rules: DrawingRules, progress: Progress | None = None) -> None:
        self.pool = replicas.pool(work, partial(open_writing, rules), progress)
        self.facts = self.pool.facts
        self.ends, self.size, self.missing = self.pool.about

    def write(self, asked: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        batches = batches_of_texts(asked, self.size or TEXTS)

        def arguments(number: int, done: Bools) -> tuple[Any, ...]:
            batch = batches[number]
            return [asked[index] for index in batch.tolist()], done[batch], _ignore

        fix = "give fewer --sequences, or replicas with more memory"
        for index, text in self.pool.share(Pieces("text", fix, "write", batches, arguments), done):
            tell(len(text.ids))
            yield index, text

    def account(self) -> list[str]:
        return [*self.pool.ask("account"), *self.pool.notes()]

    def close(self) -> None:
        self.pool.close()
