"""Columns of a whole run, one row per target: in memory, or read from disk on first use.

A column that was not measured is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from scoremode.core.scores.schema import DIVERGENCE, Array, DivergenceColumns, FactColumns, ScoreColumns
from scoremode.values import Ids


class LazyColumns:
    """Arrays of equal length. Those of a stored run are read from disk on first use and then kept in memory."""

    __slots__ = ("_stored",)
    _stored: Any  # the ColumnFile of a stored run; not set if all columns are in memory

    @classmethod
    def on_disk(cls, stored: Any) -> Self:
        made = object.__new__(cls)
        object.__setattr__(made, "_stored", stored)
        return made

    def columns(self) -> Iterator[tuple[str, Array]]:
        """The columns that were measured, by name."""
        for name in type(self).__slots__:
            if (column := getattr(self, name)) is not None:
                yield name, column

    if not TYPE_CHECKING:  # type checkers see the columns as fields of the subclasses

        def __getattr__(self, name: str) -> Any:
            """Read a column; Python calls this only for a slot that is not set yet."""
            if name not in type(self).__slots__:
                raise AttributeError(f"'{type(self).__name__}' has no column '{name}'")
            column = self._stored.read(name)
            object.__setattr__(self, name, column)
            return column

    def __repr__(self) -> str:
        """Names the columns that were measured; none of them is read for that."""
        stored = getattr(self, "_stored", None)
        names = [name for name in type(self).__slots__ if self.has(name)]
        if not names:
            return f"{type(self).__name__}(not measured)"
        count = len(getattr(self, names[0])) if stored is None else stored.rows
        return f"{type(self).__name__}({count:,} targets: {', '.join(names)})"

    def has(self, name: str) -> bool:
        """Was this column measured? The column itself is not read."""
        stored = getattr(self, "_stored", None)
        if stored is None or name not in type(self).__slots__:
            return getattr(self, name, None) is not None
        return name not in stored.not_measured


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Scores(LazyColumns, ScoreColumns):
    """One row per target (n,), in plan order. A column that was not measured is None."""

    def __len__(self) -> int:
        stored = getattr(self, "_stored", None)
        return len(self.logprob) if stored is None else stored.rows


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Divergences(LazyColumns, DivergenceColumns):
    """How far each row's distribution is from a baseline's, one row per target (n,), in plan order."""

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the columns that were measured; none of them is read for that."""
        return tuple(column.name for column in DIVERGENCE if self.has(column.name))


@dataclass(frozen=True, slots=True, eq=False)
class CodedTexts:
    """Texts on their way to disk, many of them equal: each different text once, and for each row its text's code."""

    codes: Ids | None  # (n,); None if the texts were not measured
    words: list[str]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TargetFacts(LazyColumns, FactColumns):
    """Where each target stands in the text, one row per target (n,)."""
