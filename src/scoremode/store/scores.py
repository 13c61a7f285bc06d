"""Columns of numbers, one row per target: in memory, or read from disk when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from scoremode.values import BLOCK, Floats, Ids, Ints


class StoredColumns(Protocol):
    """Columns on disk, of one length."""

    rows: int

    def read(self, name: str) -> npt.NDArray[Any]:
        """A whole column."""
        ...

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Some columns side by side, BLOCK rows at a time."""
        ...


class Columns:
    """Arrays of one length. Those of a stored run are read when they are first asked for; from then on they stay."""

    __slots__ = ("_stored",)
    _stored: StoredColumns  # left empty where all columns are in memory

    @classmethod
    def on_disk(cls, stored: StoredColumns) -> Self:
        made = object.__new__(cls)
        object.__setattr__(made, "_stored", stored)
        return made

    if not TYPE_CHECKING:  # type checkers know the columns as fields

        def __getattr__(self, name: str) -> Any:
            """Python asks here only for a slot that is still empty."""
            if name not in type(self).__slots__:
                raise AttributeError(f"'{type(self).__name__}' has no column '{name}'")
            column = self._stored.read(name)
            object.__setattr__(self, name, column)
            return column

    def blocks(self, *names: str) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Some columns side by side, BLOCK rows at a time; what lies on disk is not kept in memory."""
        stored = getattr(self, "_stored", None)
        if stored is not None:
            yield from stored.blocks(names)
            return
        columns = [getattr(self, name) for name in names]
        for begin in range(0, len(columns[0]), BLOCK):
            yield tuple(column[begin : begin + BLOCK] for column in columns)


@dataclass(frozen=True, slots=True, eq=False)
class Scores(Columns):
    """One row per target, in plan order."""

    logprob: Floats  # (n,) nats, <= 0
    rank: Ints  # (n,) 1 = the model's first choice
    entropy: Floats  # (n,) nats, of the whole next-token distribution
    top: Ids  # (n,) the model's first choice
    top_logprob: Floats  # (n,) nats

    def __len__(self) -> int:
        stored = getattr(self, "_stored", None)
        return len(self.logprob) if stored is None else stored.rows

    def rows(self, begin: int, end: int) -> Scores:
        """The scores of some consecutive targets."""
        return Scores(*(column[begin:end] for _, column in self.columns()))

    @staticmethod
    def empty(n: int) -> Scores:
        """Room for n scores, NaN until filled, so that a hole cannot pass for a number."""
        return Scores(
            logprob=np.full(n, np.nan),
            rank=np.zeros(n, np.int64),
            entropy=np.full(n, np.nan),
            top=np.full(n, -1, np.int32),
            top_logprob=np.full(n, np.nan),
        )

    def columns(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name in ("logprob", "rank", "entropy", "top", "top_logprob"):
            yield name, getattr(self, name)


@dataclass(frozen=True, slots=True, eq=False)
class TargetFacts(Columns):
    """Where each target stands in the text: what a person needs to read the scores. One row per target."""

    window: Ints  # (n,)
    document: Ints  # (n,)
    token: Ints  # (n,) index in the stream
    id: Ids  # (n,)
    byte_len: Ids  # (n,)
    word_starts: Ids  # (n,)
    group: Ints  # (n,) targets of one group are not independent of each other
    weight: Floats  # (n,) how much the target counts in the method's mean: 1 unless windows are averaged
    text: npt.NDArray[np.object_]  # (n,) the characters of the source that the token stands for
    top_text: npt.NDArray[np.object_]  # (n,) the model's first choice, decoded
