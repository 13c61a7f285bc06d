"""The interface of models that write texts for rollouts, with the log-probability of every token when it was drawn.

On several replicas, a batch of texts goes to one replica at a time. Which texts share a batch follows from the prompts
alone, so the texts do not depend on the number of replicas, nor on which of them wrote what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import ChosenEngine, open_for
from scoremode.core.extensions import Replicas
from scoremode.core.models.subject import Subject
from scoremode.core.strict_json import read_object
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.replicas import Pieces, Worker
from scoremode.studies.rollouts.texts import WrittenTokens
from scoremode.values import Bools, Ids, Ints

if TYPE_CHECKING:
    from scoremode.core.engine.base import EngineFacts

PIECE = 64  # texts that a replica writes at a time, if batches do not matter


@dataclass(frozen=True, slots=True)
class DrawingRules:
    """How a token is drawn from the distribution of a step: temperature first, then min-p, top-k and top-p."""

    temperature: float = 0.0  # 0: the model's first choice; of equal ones, the lowest id
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_own(self) -> bool:
        """Are tokens drawn from the model's own distribution?"""
        return self.temperature == 1 and self.top_p == 1 and self.top_k == 0 and self.min_p == 0


@dataclass(frozen=True, slots=True, eq=False)
class WritingRequest:
    """A text to be written: the ids before it, the seed of its draws, and how many tokens it may have."""

    prompt: Ids  # at least one token
    seed: int
    room: int  # 1 or more


Tell = Callable[[int], None]
"""Is called with a number of tokens that were written since the last call."""


class Writer(ABC):
    """A model that was opened to write texts, each after a prompt.

    The last token of a text is an end token, unless its room was used up, or the engine says that it ended by itself.
    """

    facts: EngineFacts
    ends: frozenset[int]  # the tokens that end a text
    size: int = 0  # texts of a batch, as ``batches_of_texts`` forms them; 0: batches change no number, or are not known
    missing: tuple[str, ...] = ()  # "logprob" if only those of the model's own distribution are known: it is NaN then

    @abstractmethod
    def write(self, requests: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        """Texts for every request that is not ``done``, with its index, in any order, each as soon as it has ended.

        Where batches may change a number, which texts share one must follow from ``requests`` alone, not from ``done``.
        """

    def account(self) -> list[str]:
        """What a reader of the texts must know about how they were written."""
        return []

    def close(self) -> None:  # noqa: B027 - some writers have nothing to release
        """Releases the memory and processes that the writer holds."""


def batches_of_texts(requests: Sequence[WritingRequest], size: int) -> list[Ints]:
    """Texts that are written side by side: those with prompts of similar length."""
    order = np.argsort([len(request.prompt) for request in requests], kind="stable")
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def end_tokens(subject: Subject) -> frozenset[int]:
    """The tokens at which a checkpoint's texts end: those of generation_config.json or config.json, and the EOS."""
    assert subject.checkpoint is not None
    try:
        eos = read_object(subject.checkpoint.path / "generation_config.json").get("eos_token_id")
    except (OSError, ValueError):
        eos = subject.checkpoint.config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return frozenset(token for token in (*ids, subject.tokenizer.facts.eos) if type(token) is int and token >= 0)


# ── replicas ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def open_writing(rules: DrawingRules, chosen: ChosenEngine, work: Work) -> Worker:
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

    def write(self, requests: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        batches = batches_of_texts(requests, self.size or PIECE)

        def arguments(number: int, done: Bools) -> tuple[Any, ...]:
            batch = batches[number]
            return [requests[index] for index in batch.tolist()], done[batch], _ignore

        fix = "give fewer --sequences, or replicas with more memory"
        for index, text in self.pool.share(Pieces("text", fix, "write", batches, arguments), done):
            tell(len(text.ids))
            yield index, text

    def account(self) -> list[str]:
        return [*self.pool.ask("account"), *self.pool.notes()]

    def close(self) -> None:
        self.pool.close()
