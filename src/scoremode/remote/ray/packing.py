"""Packs windows and answers for replicas.

``PackedWindows``   many windows as a few flat arrays: to a replica, inside a WindowSubset
``PackedAnswers``   answers to many windows, column by column: back from it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.scores.answers import REQUESTED, Answers, Window
from scoremode.core.scores.schema import BUILT_IN, Array, chosen_divergences
from scoremode.values import Ids, Ints, Raw

INT32 = np.dtype("<i4")


def _ends(lengths: Sequence[int] | Ints) -> Ints:
    return np.cumsum(np.asarray(lengths, dtype=np.int64))


def _between(ends: Ints, index: int) -> slice:
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


def _joined(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Raw:
    """Joins all numbers of some arrays, one after the other."""
    flat = [np.ascontiguousarray(array, dtype).reshape(-1) for array in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat) if flat else np.empty(0, dtype)


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class PackedWindows:
    """Many windows as flat arrays."""

    ids: Ids
    id_ends: Ints  # (windows,)
    rows: Ids
    row_ends: Ints  # (windows,)
    targets: Ids
    target_ends: Ints  # (windows,)
    widths: Ints  # (windows,) targets per row

    @staticmethod
    def of(windows: Sequence[Window]) -> PackedWindows:
        return PackedWindows(
            ids=_joined([w.ids for w in windows], INT32),
            id_ends=_ends([len(w.ids) for w in windows]),
            rows=_joined([w.rows for w in windows], INT32),
            row_ends=_ends([len(w.rows) for w in windows]),
            targets=_joined([w.targets for w in windows], INT32),
            target_ends=_ends([w.targets.size for w in windows]),
            widths=np.array([w.targets.shape[1] for w in windows], np.int64),
        )

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.id_ends, prepend=0)

    def window(self, index: int) -> Window:
        rows = self.rows[_between(self.row_ends, index)]
        targets = self.targets[_between(self.target_ends, index)].reshape(len(rows), int(self.widths[index]))
        return Window(self.ids[_between(self.id_ends, index)], rows, targets)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class PackedAnswers:
    """Answers to some windows, column by column. All answers have the same columns."""

    windows: Ints  # (windows,) index of each window
    rows: Ints  # (windows,) rows of each window
    widths: Ints  # (windows,) targets per row
    columns: dict[str, Raw]

    @staticmethod
    def of(pairs: Sequence[tuple[int, Answers]]) -> PackedAnswers:
        answers = [answer for _, answer in pairs]
        first = answers[0]
        schema = (*BUILT_IN.chosen(first.columns), *chosen_divergences(first.divergences))
        columns = {c.name: _joined([getattr(answer, c.name) for answer in answers], c.numpy_type) for c in schema}
        for name in REQUESTED:
            if name not in columns and getattr(first, name) is not None:
                columns[name] = np.concatenate([getattr(answer, name) for answer in answers])
        shapes = np.array([answer.logprob.shape for answer in answers], dtype=np.int64).reshape(-1, 2)
        return PackedAnswers(np.array([i for i, _ in pairs], np.int64), shapes[:, 0], shapes[:, 1], columns)

    def answers(self) -> Iterator[tuple[int, Answers]]:
        """Yields each window's number and a copy of its answers, so that Ray can free the block when all are read."""
        cells, rows = _ends(self.rows * self.widths), _ends(self.rows)
        of_targets = {column.name for column in BUILT_IN.scores if column.per == "target"}
        for i, window in enumerate(self.windows.tolist()):
            shape, arrays = (int(self.rows[i]), int(self.widths[i])), {}
            for name, column in self.columns.items():
                part = column[_between(cells if name in of_targets else rows, i)].copy()
                arrays[name] = part.reshape(shape) if name in of_targets else part
            yield window, Answers(**arrays)


class AnswerPacker:
    """Collects answers until they are sent together."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self.found: list[tuple[int, Answers]] = []

    def add(self, window: int, answers: Answers) -> None:
        self.found.append((window, answers))
        self.size += sum(column.nbytes for _, column in answers.arrays())

    def fits(self, answers: Answers) -> bool:
        """Does this answer have the same columns as the answers before it?"""
        return not self.found or [n for n, _ in answers.arrays()] == [n for n, _ in self.found[0][1].arrays()]

    def take(self) -> PackedAnswers:
        pairs, self.found, self.size = self.found, [], 0
        return PackedAnswers.of(pairs)
