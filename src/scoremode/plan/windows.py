"""What an engine is asked and what it answers: windows in, answers out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from scoremode.values import Floats, Ids, Ints, Raw


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Tokens fed in one forward pass, and what is asked of them.

    Row r sees ``ids[:r + 1]`` and predicts what follows; position 0 is never a target because no row precedes it.
    """

    ids: Ids  # (t,) fed
    rows: Ids  # (m,) ascending, each < t
    targets: Ids  # (m, k) token ids whose score is wanted at that row


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """An engine's answer to one window: one line per row asked, one column per target asked at that row.

    Only ``logprob`` is required. None means "not measured": it is shown as such everywhere, and nothing is filled in.
    """

    logprob: Floats  # (m, k) nats
    rank: Ints | None = None  # (m, k) 1 = first choice; ties go to the lower id
    entropy: Floats | None = None  # (m,) nats, of the whole next-token distribution
    top: Ids | None = None  # (m,) first choice
    top_logprob: Floats | None = None  # (m,) nats
    states: Raw | None = None  # (m, d) final hidden states, bit for bit; only where they were wanted
    kl: Floats | None = None  # (m,) nats, KL(baseline‖this model); only where a baseline was given


T = TypeVar("T")


def measured(column: T | None) -> T:
    """A column that the engine is known to give.

    >>> measured([1, 2])
    [1, 2]
    """
    assert column is not None, "a column that was not measured"
    return column


class WindowSource(Protocol):
    """Anything that engines can score: a Plan, or a list of hand-made windows."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Ints: ...  # (windows,) tokens fed by each

    @property
    def prefix_group(self) -> Ints | None: ...  # (windows,) equal numbers promise a common beginning worth sharing

    @property
    def vocabulary(self) -> int | None: ...  # ids from here on get no probability; None: all that the head has

    def window(self, index: int) -> Window: ...


@dataclass(frozen=True, slots=True)
class WindowList:
    """Hand-made windows, for questions that no method asks."""

    items: tuple[Window, ...]
    prefix_group: Ints | None = None
    vocabulary: int | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> Ints:
        return np.array([len(w.ids) for w in self.items], dtype=np.int64)

    def window(self, index: int) -> Window:
        return self.items[index]
