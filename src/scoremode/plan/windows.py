"""What an engine is asked and what it answers: windows in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from scoremode.values import Floats, Ids, Ints, Raw

COLUMNS = ("logprob", "rank", "entropy", "top", "top_logprob")
"""What can be measured of a target. Every engine gives ``logprob``."""


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
    ``top`` and ``top_logprob`` come together or not at all. All answers of one engine have the same columns.
    """

    logprob: Floats  # (m, k) nats
    rank: Ints | None = None  # (m, k) 1 = first choice; ties go to the lower id
    entropy: Floats | None = None  # (m,) nats, of the whole next-token distribution
    top: Ids | None = None  # (m,) first choice
    top_logprob: Floats | None = None  # (m,) nats
    states: Raw | None = None  # (m, d) final hidden states, bit for bit; only where they were wanted
    kl: Floats | None = None  # (m,) nats, KL(baseline‖this model); only where a baseline was given

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that were measured, in the order of COLUMNS.

        >>> Answers(np.zeros((1, 1)), entropy=np.zeros(1)).columns
        ('logprob', 'entropy')
        """
        return tuple(name for name in COLUMNS if getattr(self, name) is not None)


def column_set_problem(columns: Sequence[str]) -> str | None:
    """What is wrong with a set of columns, in words; None if it can be.

    >>> column_set_problem(("logprob", "top"))
    'top and top_logprob come together or not at all'
    """
    if "logprob" not in columns:
        return "logprob is missing"
    if ("top" in columns) != ("top_logprob" in columns):
        return "top and top_logprob come together or not at all"
    return None


def joined_names(columns: Sequence[str]) -> str:
    """Names of columns in a sentence.

    >>> joined_names(("logprob", "rank", "entropy"))
    'logprob, rank and entropy'
    """
    return " and ".join([", ".join(columns[:-1]), columns[-1]] if len(columns) > 1 else columns)


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
