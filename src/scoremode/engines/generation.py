"""Text that a model writes itself: for tasks whose answers are generated. Nothing here is a score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scoremode.values import Ids


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a text is written."""

    max_tokens: int
    stop: tuple[str, ...] = ()  # the text may end where one of these stands; what follows it is cut by the caller
    temperature: float = 0.0  # 0: the first choice at every step
    more: Mapping[str, Any] = field(default_factory=dict)  # as the engine's own library names them: top_p, top_k, …


class Generator(ABC):
    """A model that is open for writing, and for nothing else."""

    @abstractmethod
    def generate(self, prompts: Sequence[Ids], sampling: Sampling) -> Iterator[tuple[int, Ids]]:
        """The ids that follow each prompt, with the prompt's index, in any order, each exactly once."""

    def close(self) -> None:  # noqa: B027 - some have nothing to give back
        """Give back what the generator holds."""
