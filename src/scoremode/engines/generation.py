"""The interface of models that write text, for tasks whose answers are generated. Nothing here is a score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scoremode.values import Ids


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a model chooses the tokens that it writes, and when it stops."""

    max_tokens: int
    stop: tuple[str, ...] = ()  # the text may end where one of these stands; what follows it is cut by the caller
    temperature: float = 0.0  # 0: the first choice at every step
    more: Mapping[str, Any] = field(default_factory=dict)  # as the engine's own library names them: top_p, top_k, …


class Generator(ABC):
    """A model that was opened to write text, and for nothing else."""

    @abstractmethod
    def generate(self, prompts: Sequence[Ids], sampling: Sampling) -> Iterator[tuple[int, Ids]]:
        """For each prompt, exactly once and in any order: its index, and the ids that the model writes after it."""

    def close(self) -> None:  # noqa: B027 - some have nothing to give back
        """Release the memory and processes that the generator holds."""
