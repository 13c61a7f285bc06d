"""What travels: windows to replicas, and their answers back, as a few flat arrays however many windows there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.values import Ids, Ints, Raw


def _ends(lengths: Sequence[int]) -> Ints:
    return np.cumsum(np.array(lengths, dtype=np.int64))


def _between(ends: Ints, index: int) -> slice:
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """Some windows of a source, with nothing else of it: a source of its own that says which of them share a batch."""

    indices: Ints  # (windows,) in the source that they come from
    ids: Ids
    id_ends: Ints  # (windows,)
    rows: Ids
    row_ends: Ints  # (windows,)
    targets: Ids
    target_ends: Ints  # (windows,)
    widths: Ints  # (windows,) targets of each of its rows
    batch_ends: Ints | None  # (batches,) windows before the end of each; None: engines find batches by their own rule
    prefix_group: Ints | None
    vocabulary: int | None
    target_offsets: Ints | None = None  # (windows,) where the targets of each begin among all targets of the source

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.id_ends, prepend=0)

    @property
    def batches(self) -> list[Ints] | None:
        """Windows that share a batch, as the source they come from has it."""
        if self.batch_ends is None:
            return None
        return [part for part in np.split(np.arange(len(self)), self.batch_ends[:-1]) if len(part)]

    def window(self, index: int) -> Window:
        rows = self.rows[_between(self.row_ends, index)]
        targets = self.targets[_between(self.target_ends, index)].reshape(len(rows), int(self.widths[index]))
        return Window(self.ids[_between(self.id_ends, index)], rows, targets)


def parcel_of(source: WindowSource, batches: Sequence[Ints]) -> Parcel:
    """Whole batches of a source, in their order."""
    indices = np.concatenate(batches).astype(np.int64)
    windows = [source.window(index) for index in indices.tolist()]
    offsets: Ints | None = getattr(source, "target_offsets", None)
    return Parcel(
        indices=indices,
        ids=np.concatenate([w.ids for w in windows]).astype(np.int32, copy=False),
        id_ends=_ends([len(w.ids) for w in windows]),
        rows=np.concatenate([w.rows for w in windows]).astype(np.int32, copy=False),
        row_ends=_ends([len(w.rows) for w in windows]),
        targets=np.concatenate([w.targets.reshape(-1) for w in windows]).astype(np.int32, copy=False),
        target_ends=_ends([w.targets.size for w in windows]),
        widths=np.array([w.targets.shape[1] for w in windows], dtype=np.int64),
        batch_ends=_ends([len(batch) for batch in batches]),
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


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
COLUMNS = tuple(f.name for f in fields(Answers))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Answers of some windows of a parcel, column by column."""

    windows: Ints  # (windows,) in the parcel
    rows: Ints  # (windows,) of each
    widths: Ints  # (windows,) targets of each of its rows
    columns: dict[str, Raw]

    def answers(self) -> Iterator[tuple[int, Answers]]:
        """Each window with answers of its own memory: what Ray keeps of a block is given back when all are read."""
        cells = _ends((self.rows * self.widths).tolist())
        rows = _ends(self.rows.tolist())
        for i, window in enumerate(self.windows.tolist()):
            found: dict[str, Any] = {}
            for name, column in self.columns.items():
                of_targets = name in ("logprob", "rank")
                part = column[_between(cells if of_targets else rows, i)].copy()
                found[name] = part.reshape(int(self.rows[i]), int(self.widths[i])) if of_targets else part
            yield window, Answers(**found)


@dataclass(slots=True)
class Collector:
    """Answers on their way into a block."""

    found: list[tuple[int, Answers]] = field(default_factory=list)
    size: int = 0  # bytes

    def add(self, window: int, answers: Answers) -> None:
        self.found.append((window, answers))
        self.size += sum(c.nbytes for name in COLUMNS if (c := getattr(answers, name)) is not None)

    def fits(self, answers: Answers) -> bool:
        """Has this answer the columns of those before it? A block has one set of columns."""
        if not self.found:
            return True
        first = self.found[0][1]
        return all((getattr(first, name) is None) == (getattr(answers, name) is None) for name in COLUMNS)

    def take(self) -> Block:
        found, self.found, self.size = self.found, [], 0
        columns = {}
        for name in COLUMNS:
            parts = [getattr(answers, name) for _, answers in found]
            if parts[0] is not None:
                of_targets = name in ("logprob", "rank")
                columns[name] = np.concatenate([part.reshape(-1) if of_targets else part for part in parts])
        shapes = np.array([answers.logprob.shape for _, answers in found], dtype=np.int64).reshape(-1, 2)
        windows = np.array([window for window, _ in found], dtype=np.int64)
        return Block(windows, shapes[:, 0], shapes[:, 1], columns)
