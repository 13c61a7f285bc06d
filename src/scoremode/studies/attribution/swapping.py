"""The interface of a baseline whose weights are swapped for those of candidates, some at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scoremode.studies.attribution.weight_formats.stored import Shape, StoredWeight
from scoremode.values import Bools, Floats

if TYPE_CHECKING:
    from scoremode.core.engine.base import EngineFacts, NoiseFloor
    from scoremode.core.plan.plan import Plan

Tell = Callable[[int, float], None]
"""Is called with the number of a swap, and the part of it that is done: 0 when it begins."""


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """What is known about a model's weights without reading them."""

    label: str
    notes: tuple[str, ...]
    stored: Mapping[str, StoredWeight]  # by the name of the baseline's parameter


@dataclass(frozen=True, slots=True)
class SwapFacts:
    """A baseline and its candidates, as far as units, their sizes and recipes need them."""

    model_type: str
    layers_name: str  # the name of the list of decoder layers, as in ``model.layers``
    layers: int
    starts: Mapping[str, int]  # the first layer that other weights of a parameter change; ``layers``: only the head
    own: WeightFacts
    candidates: Mapping[str, WeightFacts]
    notes: tuple[str, ...]
    is_untied: bool = False  # its head was its embedding, and is a copy of it for these candidates

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: one.shape for name, one in self.own.stored.items()}

    def start_of(self, names: Collection[str]) -> int:
        """The first layer that other weights under these names change."""
        return min((self.starts[name] for name in names), default=self.layers)


@dataclass(frozen=True, slots=True)
class Swap:
    """Weights of candidates in place of the baseline's own."""

    words: str  # for people, as in "layer 3 of model-Q4_K_M.gguf"
    sources: Mapping[str, str]  # name of a parameter ─▶ the candidate that it is taken from


@dataclass(frozen=True, slots=True, eq=False)
class SwapColumns:
    """What a swap does to the baseline, one line per target."""

    kl: Floats
    moved: Floats  # the change of log-probability
    same: Bools  # is the first choice the same?


class Swapper(ABC):
    """A baseline whose weights can be swapped. The caller closes it."""

    facts: SwapFacts

    @abstractmethod
    def engine_facts(self) -> EngineFacts:
        """The facts of the engine that computes. They may change when the first divergence is measured."""

    @abstractmethod
    def record(self, plan: Plan, swaps: Sequence[Swap], tell: Callable[[int], None]) -> None:
        """Prepares for these swaps, if that takes long. ``tell`` gets the number of tokens that were fed."""

    @abstractmethod
    def columns(self, plan: Plan, swaps: Sequence[Swap], tell: Tell) -> Iterator[tuple[int, SwapColumns | None]]:
        """Measures each swap on all windows; yields its number, in any order. None: its weights are the baseline's."""

    @abstractmethod
    def noise(self, plan: Plan) -> NoiseFloor:
        """KL of the baseline against itself, computed in a different way."""

    def account(self) -> list[str]:
        """What a reader of the numbers must know about who computed them."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Ends what was started for the swaps."""
