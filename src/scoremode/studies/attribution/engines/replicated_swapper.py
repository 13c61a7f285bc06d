"""A baseline on several replicas whose weights are swapped, behind the face of one swapper.

Each replica scores the baseline once, keeps the states between its layers, and is given one swap at a time. A swap has
the same numbers on every replica, and in one process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from scoremode.core.engine.base import EngineFacts, NoiseFloor
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen, open_for
from scoremode.core.plan.plan import Plan
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.replicas import OTHER_FILES, Pieces, Replicas, Worker
from scoremode.errors import EngineError
from scoremode.studies.attribution.swapping import Swap, SwapColumns, Swapper, Tell
from scoremode.studies.attribution.weights import candidate_fingerprint
from scoremode.values import Bools


def open_swapping(candidates: Mapping[str, str], chosen: Chosen, work: Work) -> Worker:
    """Opens a swapper inside a replica, whose node must have the candidates with these fingerprints."""
    token = getattr(chosen.options, "token", None)
    for name, fingerprint in candidates.items():
        if candidate_fingerprint(name, token) != fingerprint:
            raise EngineError(f"{socket.gethostname()} has other weights in {name}", fix=OTHER_FILES)
    swapper: Swapper = open_for(chosen, "swaps", work, tuple(candidates))
    return Worker(_SwapWorker(swapper), swapper.engine_facts(), swapper.facts)


class _SwapWorker:
    def __init__(self, swapper: Swapper) -> None:
        self.engine_facts, self.noise, self.close = swapper.engine_facts, swapper.noise, swapper.close
        self._swapper = swapper

    def swap(self, sent: tuple[Plan, list[Swap]], number: int) -> Iterator[tuple[int, SwapColumns | None]]:
        """Measures one of the swaps that were sent, with the states that all of them start from."""
        plan, swaps = sent
        self._swapper.record(plan, swaps, lambda fed: None)
        yield from self._swapper.columns(plan, [swaps[number]], lambda number, part: None)


class ReplicatedSwapper(Swapper):
    """Swaps weights on several replicas. It is open as soon as one replica is."""

    def __init__(
        self, replicas: Replicas, work: Work, candidates: Mapping[str, str], progress: Progress | None = None
    ) -> None:
        """``candidates`` have the fingerprints of their files."""
        self.pool = replicas.pool(work, partial(open_swapping, candidates), progress)
        self.facts = self.pool.about

    def engine_facts(self) -> EngineFacts:
        found: EngineFacts = self.pool.ask("engine_facts")
        return found

    def record(self, plan: Plan, swaps: Sequence[Swap], tell: Callable[[int], None]) -> None:
        """Does nothing: each replica scores the baseline itself when its first swap comes."""

    def columns(self, plan: Plan, swaps: Sequence[Swap], tell: Tell) -> Iterator[tuple[int, SwapColumns | None]]:
        sent = self.pool.put((plan, list(swaps)))

        def arguments(number: int, done: Bools) -> tuple[Any, ...]:
            tell(number, 0.0)
            return sent, number

        members = [np.array([number]) for number in range(len(swaps))]
        pieces = Pieces("swap", "give fewer --replicas to a node", "swap", members, arguments)
        yield from self.pool.share(pieces, np.zeros(len(swaps), np.bool_))

    def noise(self, plan: Plan) -> NoiseFloor:
        found: NoiseFloor = self.pool.ask("noise", plan)
        return found

    def account(self) -> list[str]:
        return self.pool.notes()

    def close(self) -> None:
        self.pool.close()
