"""A baseline on several replicas whose weights are swapped, behind the face of one swapper.

Each replica scores the baseline once, keeps the states between its layers, and is given one swap at a time. A swap has
the same numbers on every replica, and in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scoremode.core.engine.base import EngineFacts, NoiseFloor
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen
from scoremode.core.plan.plan import Plan
from scoremode.remote.ray.engine import StartedReplicas
from scoremode.remote.ray.replica import MeasuredSwap, ReplicaSpec
from scoremode.remote.ray.replica_pool import Piece, Piecework, ReplicaHandle, ReplicaPool
from scoremode.remote.ray.spread import Spread
from scoremode.studies.attribution.swapping import Swap, SwapColumns, Swapper, Tell
from scoremode.values import Ints


class ReplicatedSwapper(Swapper):
    """Swaps weights on several replicas. It is open as soon as one replica is."""

    def __init__(
        self,
        chosen: Chosen,
        work: Work,
        spread: Spread,
        candidates: Mapping[str, str],
        tokenizer: str | None = None,
        *,
        tell: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``candidates`` have their fingerprints; ``tell`` and ``say`` are those of ``StartedReplicas``."""
        spec = ReplicaSpec.of(chosen, tokenizer, work, candidates=candidates)
        self._replicas = StartedReplicas(chosen, spec, spread, tell, say)
        swaps = self._replicas.first.swaps
        assert swaps is not None, "a replica that was opened to swap"
        self.facts = swaps

    def engine_facts(self) -> EngineFacts:
        found: EngineFacts = self._replicas.pool.ask("facts")
        return found

    def record(self, plan: Plan, swaps: Sequence[Swap], tell: Callable[[int], None]) -> None:
        """Does nothing: each replica scores the baseline itself when its first swap comes."""

    def columns(self, plan: Plan, swaps: Sequence[Swap], tell: Tell) -> Iterator[tuple[int, SwapColumns | None]]:
        pool = self._replicas.pool
        yield from pool.results(_Swapping(pool, plan, swaps, tell))

    def noise(self, plan: Plan) -> NoiseFloor:
        found: NoiseFloor = self._replicas.pool.ask("swap_noise", plan)
        return found

    def account(self) -> list[str]:
        return self._replicas.log.notes()

    def close(self) -> None:
        self._replicas.close()


class _Swapping(Piecework):
    """All swaps of one call, each a piece."""

    unit = "swap"
    fix = "give fewer --replicas to a node"

    def __init__(self, pool: ReplicaPool, plan: Plan, swaps: Sequence[Swap], tell: Tell) -> None:
        super().__init__([Piece([number]) for number in range(len(swaps))], np.zeros(len(swaps), np.bool_))
        self.plan, self.sent, self.tell = plan, pool.put((plan, list(swaps))), tell

    def members(self, number: int) -> Ints:
        return np.array([number], np.int64)

    def send(self, replica: ReplicaHandle, piece: Piece) -> Any:
        self.tell(piece.numbers[0], 0.0)
        return replica.actor.swap.options(num_returns="streaming").remote(self.sent, piece.numbers[0])

    def accept(
        self, replica: ReplicaHandle, piece: Piece, said: MeasuredSwap
    ) -> Iterator[tuple[int, SwapColumns | None]]:
        self.done[piece.numbers[0]] = True
        replica.stats.windows += len(self.plan)
        replica.stats.tokens += self.plan.forward_tokens
        yield piece.numbers[0], said.columns
