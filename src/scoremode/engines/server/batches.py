"""Which windows go to a scoring service in one request: about as many as it computes in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scoremode.engines.base import Baseline
from scoremode.engines.messages import Against, Asked
from scoremode.engines.server.service import Service
from scoremode.plan.windows import Window, WindowSource
from scoremode.values import Bools

STATES_BYTES = 32 << 20  # of a baseline's states in one request


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows that go in one request."""

    indices: tuple[int, ...]
    asked: Asked


class Batches:
    """The requests for the windows of a source, made one by one as they are sent."""

    def __init__(self, source: WindowSource, service: Service, baseline: Baseline | None, digest: str) -> None:
        self.source, self.service, self.baseline, self.digest = source, service, baseline, digest
        self._shared = np.zeros(len(source), np.bool_)
        if source.prefix_group is not None:
            _, inverse, counts = np.unique(source.prefix_group, return_inverse=True, return_counts=True)
            self._shared = counts[inverse] > 1

    def of(self, done: Bools) -> Iterator[Batch]:
        """Requests for what is not done, in the order of the plan; windows that begin alike are together."""
        order, group = np.flatnonzero(~done), self.source.prefix_group
        if group is not None:
            order = order[np.argsort(group[order], kind="stable")]
        chosen: dict[int, Window] = {}
        most, room = self._most(), self._most()
        for index in order.tolist():
            window = self.source.window(index)
            cost = self._cost(window)
            if chosen and (cost > room or len(chosen) >= self.service.windows):
                yield self._batch(chosen)
                chosen, room = {}, most
            chosen[index] = window
            room -= cost
        if chosen:
            yield self._batch(chosen)

    def _most(self) -> int:
        """What a request may cost."""
        tokens, body = self.service.batch_tokens, self.service.body_bytes
        return min(tokens, body // 32) if self.baseline is None else min(STATES_BYTES, body // 2)

    def _cost(self, window: Window) -> int:
        """Tokens; with a baseline, bytes of its states, which are more of a burden."""
        if self.baseline is None:
            return max(len(window.ids), int(window.targets.size))
        weight = self.baseline.head.weight
        return len(window.rows) * int(weight.shape[1]) * weight.dtype.itemsize

    def _batch(self, chosen: dict[int, Window]) -> Batch:
        against = None
        if self.baseline is not None:
            states = tuple(self.baseline.states(index, window) for index, window in chosen.items())
            against = Against(self.digest, self.baseline.dtype, states)
        shared = tuple(bool(self._shared[index]) for index in chosen)
        return Batch(tuple(chosen), Asked(tuple(chosen.values()), self.source.vocabulary or 0, shared, against))
