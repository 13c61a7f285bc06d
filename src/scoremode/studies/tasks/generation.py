"""The interface of models that generate text, for tasks with generated answers. It computes no scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scoremode.values import Ids


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rules by which a model chooses the tokens that it generates, and when it stops."""

    max_tokens: int
    stop: tuple[str, ...] = ()  # the text may end at one of these; the caller cuts off the text after it
    temperature: float = 0.0  # 0: the model's first choice at every step
    more: Mapping[str, Any] = field(default_factory=dict)  # others, named as in the engine's library: top_p, top_k, …


class Generator(ABC):
    """A model that was opened only to generate text."""

    @abstractmethod
    def generate(self, prompts: Sequence[Ids], sampling: Sampling) -> Iterator[tuple[int, Ids]]:
        """Yields the index of each prompt and the ids generated after it, exactly once per prompt, in any order."""

    def close(self) -> None:  # noqa: B027 - some generators have nothing to release
        """Releases the memory and processes that the generator holds."""
