"""Columns of numbers, one row per target: in memory, or read from disk on first use.

A column that was not measured is None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from scoremode.plan.windows import COLUMNS
from scoremode.values import BLOCK, Floats, Ids, Ints


class ColumnReader(Protocol):
    """Reads columns of equal length from disk."""

    rows: int
    not_measured: frozenset[str]  # names of columns

    def read(self, name: str) -> npt.NDArray[Any] | None:
        """A whole column; None if it was not measured."""
        ...

    def value(self, name: str, row: int) -> Any:
        """One value of a column that was measured."""
        ...

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Some columns side by side, BLOCK rows at a time; None in place of one that was not measured."""
        ...


class LazyColumns:
    """Arrays of equal length. Those of a stored run are read from disk on first use and then kept in memory."""

    __slots__ = ("_stored",)
    _stored: ColumnReader  # not set if all columns are in memory

    @classmethod
    def on_disk(cls, stored: ColumnReader) -> Self:
        made = object.__new__(cls)
        object.__setattr__(made, "_stored", stored)
        return made

    if not TYPE_CHECKING:  # type checkers see the columns as fields of the subclasses

        def __getattr__(self, name: str) -> Any:
            """Read a column; Python calls this only for a slot that is not set yet."""
            if name not in type(self).__slots__:
                raise AttributeError(f"'{type(self).__name__}' has no column '{name}'")
            column = self._stored.read(name)
            object.__setattr__(self, name, column)
            return column

    def has(self, name: str) -> bool:
        """Was this column measured? The column itself is not read."""
        stored = getattr(self, "_stored", None)
        return getattr(self, name) is not None if stored is None else name not in stored.not_measured

    def value(self, name: str, row: int) -> Any:
        """One value of a column that was measured; of a stored run, only the rows around it are read."""
        stored = getattr(self, "_stored", None)
        return getattr(self, name)[row] if stored is None else stored.value(name, row)

    def blocks(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Some columns side by side, BLOCK rows at a time; None in place of one that was not measured.

        Columns on disk are not kept in memory. The first column must be measured: it determines the number of rows.
        """
        stored = getattr(self, "_stored", None)
        if stored is not None:
            yield from stored.blocks(names)
            return
        columns = [getattr(self, name) for name in names]
        for begin in range(0, len(columns[0]), BLOCK):
            yield tuple(None if column is None else column[begin : begin + BLOCK] for column in columns)


@dataclass(frozen=True, slots=True, eq=False)
class Scores(LazyColumns):
    """One row per target, in plan order. A column that was not measured is None."""

    logprob: Floats  # (n,) nats, <= 0
    rank: Ints | None = None  # (n,) 1 = the model's first choice
    entropy: Floats | None = None  # (n,) nats, of the whole next-token distribution
    top: Ids | None = None  # (n,) the model's first choice
    top_logprob: Floats | None = None  # (n,) nats; measured if and only if ``top`` is

    def __len__(self) -> int:
        stored = getattr(self, "_stored", None)
        return len(self.logprob) if stored is None else stored.rows

    def rows(self, begin: int, end: int) -> Scores:
        """The scores of consecutive targets."""
        return Scores(**{name: column[begin:end] for name, column in self.columns()})

    @staticmethod
    def empty(n: int, columns: Collection[str] = COLUMNS) -> Scores:
        """Space for n scores of these columns; NaN until filled, so that a missing score cannot look like a number."""
        return Scores(
            logprob=np.full(n, np.nan),
            rank=np.zeros(n, np.int64) if "rank" in columns else None,
            entropy=np.full(n, np.nan) if "entropy" in columns else None,
            top=np.full(n, -1, np.int32) if "top" in columns else None,
            top_logprob=np.full(n, np.nan) if "top_logprob" in columns else None,
        )

    def columns(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """The columns that were measured, by name."""
        for name in COLUMNS:
            if (column := getattr(self, name)) is not None:
                yield name, column


@dataclass(frozen=True, slots=True, eq=False)
class CodedTexts:
    """Texts on their way to disk, of which many are equal: each once, and which of them stands where."""

    codes: Ids  # (n,)
    words: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class TargetFacts(LazyColumns):
    """Each target's position in the text and its token's text, which a person needs to read the scores."""

    window: Ints  # (n,)
    document: Ints  # (n,)
    token: Ints  # (n,) index in the stream
    id: Ids  # (n,)
    byte_len: Ids  # (n,)
    word_starts: Ids  # (n,)
    group: Ints  # (n,) targets of one group are not independent of each other
    weight: Floats  # (n,) how much the target counts in the method's mean: 1 unless windows are averaged
    text: npt.NDArray[np.object_]  # (n,) of the token; equal ids have equal texts
    top_text: npt.NDArray[np.object_] | None = None  # (n,) of the model's first choice
