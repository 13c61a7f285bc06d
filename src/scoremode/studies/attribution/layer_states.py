"""Hidden states between the layers of a model: what engines that can give them promise, for profiles by depth.

A place is where states are looked at: place 0 is what enters the first decoder layer (the embedding), place i what
leaves layer i - 1. The last place is before the final norm. States are sums of everything that the layers so far added
(the residual stream), in float32, of every token that is fed.

    embedding ──▶ layer 0 ──▶ layer 1 ──▶ … ──▶ layer L-1 ──▶ final norm ──▶ head
        └ place 0      └ place 1                     └ place L
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from scoremode.core.engine.base import EngineFacts
from scoremode.core.scores.answers import Window

States = NDArray[np.float32]
"""(places, tokens, width)"""


class LayerStates(ABC):
    """An open model that gives its hidden states between layers."""

    facts: EngineFacts
    layers: int  # decoder layers
    width: int  # numbers of one state

    @abstractmethod
    def states(self, windows: Sequence[Window]) -> Iterator[States]:
        """Yields the states (layers + 1, tokens, width) of each window, in order.

        The engine may compute windows of one call together. All of them are in memory at once.
        """

    def close(self) -> None:  # noqa: B027 - some engines have nothing to release
        """Releases the memory and processes that the engine holds."""


def fed_tokens(window: Window) -> int:
    """The tokens of a window that are fed: those up to the last requested row."""
    return int(window.rows[-1]) + 1
