"""What an engine is asked and what it answers: windows in, answers out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scoremode.values import Floats, Ids, Ints


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
    """An engine's answer to one window: a line per row asked, a column per target asked at that row."""

    logprob: Floats  # (m, k) nats
    rank: Ints  # (m, k) 1 = first choice; ties go to the lower id
    entropy: Floats  # (m,) nats, of the whole next-token distribution
    top: Ids  # (m,) first choice
    top_logprob: Floats  # (m,) nats


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
