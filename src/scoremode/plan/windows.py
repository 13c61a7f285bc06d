"""The input and output of an engine: windows in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from scoremode.values import Floats, Ids, Ints, Raw

COLUMNS = ("logprob", "rank", "entropy", "top", "top_logprob")
"""What can be measured for a target. Every engine gives ``logprob``."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The tokens fed in one forward pass, and the rows and targets to score.

    Row r sees ``ids[:r + 1]`` and predicts the next token; position 0 is never a target because no row precedes it.
    """

    ids: Ids  # (t,) fed
    rows: Ids  # (m,) ascending, each < t
    targets: Ids  # (m, k) token ids whose score is wanted at that row


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """An engine's answer to one window: one line per requested row, one column per target of that row.

    Only ``logprob`` is required. None means "not measured": it is shown as such everywhere, and nothing is filled in.
    ``top`` and ``top_logprob`` are given together or not at all. All answers of one engine have the same columns.
    """

    logprob: Floats  # (m, k) nats
    rank: Ints | None = None  # (m, k) 1 = first choice; ties go to the lower id
    entropy: Floats | None = None  # (m,) nats, of the whole next-token distribution
    top: Ids | None = None  # (m,) first choice
    top_logprob: Floats | None = None  # (m,) nats
    states: Raw | None = None  # (m, d) final hidden states, bit for bit; only if they were requested
    kl: Floats | None = None  # (m,) nats, KL(baseline‖this model); only if a baseline was given
    records: Raw | None = None  # (m, words) uint16, the whole distributions in 16 bits; only if they were requested

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that were measured, in the order of COLUMNS.

        >>> Answers(np.zeros((1, 1)), entropy=np.zeros(1)).columns
        ('logprob', 'entropy')
        """
        if not (self.rank is None or self.entropy is None or self.top is None or self.top_logprob is None):
            return COLUMNS  # the usual case, asked for every window
        return tuple(name for name in COLUMNS if getattr(self, name) is not None)


def column_set_problem(columns: Sequence[str]) -> str | None:
    """What is wrong with a set of columns, in words; None if it is valid.

    >>> column_set_problem(("logprob", "top"))
    'top and top_logprob come together or not at all'
    """
    if "logprob" not in columns:
        return "logprob is missing"
    if ("top" in columns) != ("top_logprob" in columns):
        return "top and top_logprob come together or not at all"
    return None


def joined_names(columns: Sequence[str]) -> str:
    """Names joined for use in a sentence.

    >>> joined_names(("logprob", "rank", "entropy"))
    'logprob, rank and entropy'
    """
    return " and ".join([", ".join(columns[:-1]), columns[-1]] if len(columns) > 1 else columns)


T = TypeVar("T")


def measured(column: T | None) -> T:
    """The column itself, for code that knows it was measured (not None).

    >>> measured([1, 2])
    [1, 2]
    """
    assert column is not None, "a column that was not measured"
    return column


class WindowSource(Protocol):
    """Anything that engines can score: a Plan, or a WindowList."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Ints: ...  # (windows,) tokens fed by each

    @property
    def prefix_group(self) -> Ints | None: ...  # (windows,) windows with equal numbers begin with the same prompt

    @property
    def vocabulary(self) -> int | None: ...  # ids from here on get no probability; None: all ids of the head

    def window(self, index: int) -> Window: ...


def prescribed_batches(source: WindowSource) -> list[Ints] | None:
    """The batches of a source that was cut out of a larger one; None: engines choose batches by their own rule."""
    found: list[Ints] | None = getattr(source, "batches", None)
    return found


@dataclass(frozen=True, slots=True)
class WindowList:
    """Windows that are given explicitly, not made by a method."""

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
