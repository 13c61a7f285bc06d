"""The interface of models that write texts for rollouts, with the log-probability of every token when it was drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scoremode.core.models.subject import Subject
from scoremode.core.strict_json import read_object
from scoremode.values import Bools, Floats, Ids, Ints

if TYPE_CHECKING:
    from scoremode.core.engine.base import EngineFacts


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


@dataclass(frozen=True, slots=True, eq=False)
class WrittenTokens:
    """A text as a Writer gives it. Its last token is an end token, unless its room was used up."""

    ids: Ids
    logprob: Floats  # in the distribution that each token was drawn from; 0 for greedy choices
    raw_logprob: Floats  # in the model's own distribution, before temperature and filters
    finish: str | None = None  # "stop" if the engine says that the text ended by itself; None: its last token says it


Tell = Callable[[int], None]
"""Is called with a number of tokens that were written since the last call."""


class Writer(ABC):
    """A model that was opened to write texts, each after a prompt."""

    facts: EngineFacts
    ends: frozenset[int]  # the tokens that end a text
    size: int = 0  # texts of a batch, as ``batches_of_texts`` forms them; 0: batches change no number, or are not known
    missing: tuple[str, ...] = ()  # "logprob" if only those of the model's own distribution are known: it is NaN then

    @abstractmethod
    def write(self, asked: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        """Texts for every request that is not ``done``, with its index, in any order, each as soon as it has ended.

        Where batches may change a number, which texts share one must follow from ``asked`` alone, never from ``done``.
        """

    def account(self) -> list[str]:
        """What a reader of the texts must know about how they were written."""
        return []

    def close(self) -> None:  # noqa: B027 - some writers have nothing to release
        """Releases the memory and processes that the writer holds."""


def batches_of_texts(asked: Sequence[WritingRequest], size: int) -> list[Ints]:
    """Texts that are written side by side: those with prompts of similar length."""
    order = np.argsort([len(one.prompt) for one in asked], kind="stable")
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def end_tokens(subject: Subject) -> frozenset[int]:
    """The tokens at which a checkpoint's texts end: those of generation_config.json or config.json, and the EOS."""
    assert subject.checkpoint is not None
    try:
        said = read_object(subject.checkpoint.path / "generation_config.json").get("eos_token_id")
    except (OSError, ValueError):
        said = subject.checkpoint.config.get("eos_token_id")
    given = said if isinstance(said, list) else [said]
    return frozenset(one for one in (*given, subject.tokenizer.facts.eos) if type(one) is int and one >= 0)
