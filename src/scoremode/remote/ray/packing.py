"""Packs windows and answers for replicas: a few large arrays travel faster than many small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.core.scores.answers import Answers, Window
from scoremode.core.scores.schema import BUILT_IN
from scoremode.values import Ids, Ints, Raw

OF_TARGETS = frozenset(column.name for column in BUILT_IN.scores if column.per == "target")


def _between(ends: Ints, index: int) -> slice:
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


@dataclass(frozen=True, slots=True, eq=False)
class PackedWindows:
    """Many windows as flat arrays: to a replica, inside a WindowSubset."""

    ids: Ids
    rows: Ids
    targets: Ids
    ends: Ints  # (3, windows) where each window ends in ``ids``, ``rows`` and ``targets``
    widths: Ints  # (windows,) targets per row

    @staticmethod
    def of(windows: Sequence[Window]) -> PackedWindows:
        sizes = np.array([(len(w.ids), len(w.rows), w.targets.size, w.targets.shape[1]) for w in windows], np.int64).T
        ids, rows, targets = (
            np.concatenate([array.ravel() for array in arrays], dtype=np.int32)
            for arrays in zip(*((w.ids, w.rows, w.targets) for w in windows), strict=True)
        )
        return PackedWindows(ids, rows, targets, sizes[:3].cumsum(axis=1), sizes[3])

    @property
    def lengths(self) -> Ints:
        return np.diff(self.ends[0], prepend=0)

    def window(self, index: int) -> Window:
        ids, rows, targets = (_between(ends, index) for ends in self.ends)
        return Window(self.ids[ids], self.rows[rows], self.targets[targets].reshape(-1, int(self.widths[index])))


@dataclass(frozen=True, slots=True, eq=False)
class PackedAnswers:
    """Answers to some windows, column by column: back from a replica. All answers have the same columns."""

    windows: Ints  # (windows,) index of each window
    shapes: Ints  # (windows, 2) rows, and targets per row
    columns: dict[str, Raw]  # one line per row; those with a value per target are flat

    @staticmethod
    def of(pairs: Sequence[tuple[int, Answers]]) -> PackedAnswers:
        arrays = [dict(answers.arrays()) for _, answers in pairs]
        columns = {
            name: np.concatenate([own[name].ravel() if name in OF_TARGETS else own[name] for own in arrays])
            for name in arrays[0]
        }
        shapes = np.array([own["logprob"].shape for own in arrays], np.int64)
        return PackedAnswers(np.array([window for window, _ in pairs], np.int64), shapes, columns)

    def answers(self) -> Iterator[tuple[int, Answers]]:
        """Yields each window's number and a copy of its answers, so that Ray can free the block when all are read."""
        cells, rows = self.shapes.prod(axis=1).cumsum(), self.shapes[:, 0].cumsum()
        for i, window in enumerate(self.windows.tolist()):
            arrays = {}
            for name, column in self.columns.items():
                is_flat = name in OF_TARGETS
                part = column[_between(cells if is_flat else rows, i)].copy()
                arrays[name] = part.reshape(self.shapes[i]) if is_flat else part
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
