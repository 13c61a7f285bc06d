"""How the Transformers engine computes the same windows otherwise, for the noise floor: other batches, other threads.

What a user meets in practice: another batch size, a batch padded for a longer neighbour, a machine with other cores.
Nothing that computes with fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from scoremode.engines.tensors import IndexedWindow
from scoremode.values import Bools, Ids, Ints

PADDING = 3  # tokens behind a window


@dataclass(frozen=True, slots=True, eq=False)
class OtherBatches:
    """How windows are fed while the noise floor is measured: each in a batch of another shape than usual."""

    was_alone: Bools  # (windows,) those that usually have a batch of their own
    padding: int  # tokens behind the window; 0 where the model's context has no room for them

    @staticmethod
    def of(usual: list[Ints], padding: int) -> OtherBatches:
        """``usual`` are the batches of all windows."""
        sizes = np.repeat([len(batch) for batch in usual], [len(batch) for batch in usual])
        was_alone = np.zeros(len(sizes), np.bool_)
        was_alone[np.concatenate(usual)] = sizes == 1
        return OtherBatches(was_alone, padding)

    def batch(self, asked: list[IndexedWindow], fed: list[Ids]) -> list[Ids]:
        """What is fed for one window: with a copy of itself beside it if it was alone, and padding behind."""
        ((index, _),) = asked
        longer = [np.concatenate([ids, np.zeros(self.padding, ids.dtype)]) for ids in fed]
        return longer * 2 if self.was_alone[index] else longer

    def words(self, done: Bools, threads: str) -> str:
        alone = self.was_alone[~done]
        said = ["two windows per batch instead of one"] if alone.any() else []
        said += ["one window per batch instead of several"] if not alone.all() else []
        said += [f"{self.padding} tokens of padding"] if self.padding else []
        return ", ".join([*said, *([threads] if threads else [])])


@contextmanager
def other_threads(device: torch.device) -> Iterator[str]:
    """Another number of threads on a CPU, and what it is in words; elsewhere nothing."""
    usual = torch.get_num_threads()
    if device.type != "cpu":
        yield ""
        return
    other = usual // 2 if usual > 1 else 2
    torch.set_num_threads(other)
    try:
        yield f"{other} thread{'s' if other > 1 else ''} instead of {usual}"
    finally:
        torch.set_num_threads(usual)
