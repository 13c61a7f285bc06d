"""Pieces of work that go to one replica at a time, and to another one if that one dies or fails."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from scoremode.cluster.replica_pool import Lost, ReplicaHandle, ReplicaPool
from scoremode.errors import EngineError, InputError, ScoremodeError

MOST_DEATHS = 3  # of replicas that worked on the same piece


class Retries:
    """The pieces that wait, by number, and how often replicas died or failed over each."""

    def __init__(self, pool: ReplicaPool, pieces: Iterable[int], *, what: str, fix: str) -> None:
        """``what`` names a piece, as in "texts"; ``fix`` says what helps if replicas die again and again."""
        self.pool, self.log, self.what, self.fix = pool, pool.log, what, fix
        self.waiting = deque(pieces)
        self._deaths, self._refusals = Counter[int](), Counter[int]()

    def failed(self, replica: ReplicaHandle, piece: int | None, result: Lost | ScoremodeError) -> None:
        """Puts the piece of a replica that died or failed back, and replaces the replica.

        Raises an error that comes again on another replica. ``piece`` is None if the replica had none.
        """
        if piece is None:
            why = result.why if isinstance(result, Lost) else result.message
            self.log.event(f"{replica.name} was gone before it did anything ({why})", is_detail=True)
        elif isinstance(result, Lost):
            why = result.why
            self.log.event(f"{replica.name} is gone ({why}); its {self.what} go to others")
            self._deaths[piece] += 1
            if self._deaths[piece] >= MOST_DEATHS:
                raise EngineError(f"{MOST_DEATHS} replicas died over the same {self.what} ({why})", fix=self.fix)
        else:
            why = "its engine failed again and again"
            self._refusals[piece] += 1
            if isinstance(result, InputError) or self._refusals[piece] > 1:
                raise result
            self.log.event(f"the engine of {replica.name} failed: {result.message}; its {self.what} go to others")
        if piece is not None:
            self.waiting.appendleft(piece)
        self.pool.replace(replica, why)
