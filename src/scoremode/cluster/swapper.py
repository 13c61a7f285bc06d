"""A baseline on several replicas whose weights are swapped, behind the face of one swapper.

Each replica scores the baseline once, keeps the states between its layers, and is given one swap at a time. A swap has
the same numbers on every replica, and in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from scoremode.cluster.engine import StartedReplicas
from scoremode.cluster.replica import MeasuredSwap, ReplicaSpec
from scoremode.cluster.replica_pool import RESUME, ReplicaHandle
from scoremode.cluster.retries import Retries
from scoremode.cluster.spread import Spread
from scoremode.engines.base import EngineFacts, NoiseFloor
from scoremode.engines.plugin import Work
from scoremode.engines.registry import Chosen
from scoremode.engines.swapping import Swap, SwapColumns, Swapper, Tell
from scoremode.plan.plan import Plan

METHOD = "swap"  # of a replica


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
        retries = Retries(pool, range(len(swaps)), what="swaps", fix=f"give fewer --replicas to a node; {RESUME}")
        sent, running = pool.put((plan, list(swaps))), dict[ReplicaHandle, int]()
        try:
            while retries.waiting or running:
                for replica in pool.ready:
                    if replica not in running and retries.waiting:
                        running[replica] = number = retries.waiting.popleft()
                        replica.calls[METHOD] = replica.actor.swap.remote(sent, number)
                        tell(number, 0.0)
                for replica, _, result in pool.poll():
                    piece = running.pop(replica, None)
                    if piece is None or not isinstance(result, MeasuredSwap):
                        retries.failed(replica, piece, result)
                        continue
                    replica.failures = 0
                    replica.worked(len(plan), plan.forward_tokens, result.seconds)
                    yield piece, result.columns
        finally:
            for replica in running:  # nobody reads their answers
                replica.calls.pop(METHOD, None)

    def noise(self, plan: Plan) -> NoiseFloor:
        found: NoiseFloor = self._replicas.pool.ask("swap_noise", plan)
        return found

    def account(self) -> list[str]:
        return self._replicas.log.notes()

    def close(self) -> None:
        self._replicas.close()
