"""The noise floor of the Transformers engine: the same windows, scored in different batches and with different threads.

These are differences that occur in practice: a different batch size, a batch padded for a longer window, a machine with
a different number of cores. The precision stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from scoremode.engines.tensors import IndexedWindow
from scoremode.values import Bools, Ids, Ints

PADDING = 3  # tokens after a window


@dataclass(frozen=True, slots=True, eq=False)
class OtherBatches:
    """How windows are fed while the noise floor is measured: each in a batch of a different shape than usual."""

    was_alone: Bools  # (windows,) those that usually have their own batch
    padding: int  # tokens after the window; 0 if the model's context has no room for them

    @staticmethod
    def of(usual: list[Ints], padding: int) -> OtherBatches:
        """``usual`` is the usual split of all windows into batches."""
        sizes = np.repeat([len(batch) for batch in usual], [len(batch) for batch in usual])
        was_alone = np.zeros(len(sizes), np.bool_)
        was_alone[np.concatenate(usual)] = sizes == 1
        return OtherBatches(was_alone, padding)

    def batch(self, windows: list[IndexedWindow], fed: list[Ids]) -> list[Ids]:
        """What is fed for one window: padding is added, and a copy of the window if it was alone."""
        ((index, _),) = windows
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
    """Use a different number of threads on a CPU, and yield it in words; on other devices change nothing."""
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
