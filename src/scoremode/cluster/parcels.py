"""Windows on their way to replicas. Their answers come back as ``scores.packing.PackedAnswers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.plan.windows import Window, WindowSource
from scoremode.scores.packing import PackedWindows
from scoremode.values import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """Some windows of a source, with nothing else of it: a source of its own that says which of them share a batch."""

    indices: Ints  # (windows,) in the source that they come from
    windows: PackedWindows
    batch_ends: Ints | None  # (batches,) windows before the end of each; None: engines find batches by their own rule
    prefix_group: Ints | None
    vocabulary: int | None
    target_offsets: Ints | None = None  # (windows,) where the targets of each begin among all targets of the source

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def lengths(self) -> Ints:
        return self.windows.lengths

    @property
    def batches(self) -> list[Ints] | None:
        """Windows that share a batch, as the source they come from has it."""
        if self.batch_ends is None:
            return None
        return [part for part in np.split(np.arange(len(self)), self.batch_ends[:-1]) if len(part)]

    def window(self, index: int) -> Window:
        return self.windows.window(index)


def parcel_of(source: WindowSource, batches: Sequence[Ints]) -> Parcel:
    """Whole batches of a source, in their order."""
    indices = np.concatenate(batches).astype(np.int64)
    offsets: Ints | None = getattr(source, "target_offsets", None)
    return Parcel(
        indices=indices,
        windows=PackedWindows.of([source.window(index) for index in indices.tolist()]),
        batch_ends=np.cumsum([len(batch) for batch in batches]),
        prefix_group=None if source.prefix_group is None else np.asarray(source.prefix_group)[indices],
        vocabulary=source.vocabulary,
        target_offsets=None if offsets is None else np.asarray(offsets)[indices],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """The lengths of a source's windows: enough to find batches where no windows share a prompt."""

    lengths: Ints
    vocabulary: int | None
    prefix_group: None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def window(self, index: int) -> Window:
        raise AssertionError("batches of windows without a common prompt follow from their lengths")
