"""From logits to answers on the decode path, where every step gives one row of each of several windows.

          step 0   step 1   step 2          place 0 is the longest window of the batch
place 0   row 0    row 1    row 2
place 1   row 0    row 1                    it has ended: the next steps feed fewer windows

A candidate and a baseline that both have logits only take each step together, so that no more logits than those of one
step are in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import SCORES, Engine
from scoremode.core.engine.batching import batches_side_by_side
from scoremode.core.engine.distributions import IndexedWindow, RowsOf
from scoremode.core.engine.logits import KeepAnswers, LiveLogits, LogitsReducer, Reduced
from scoremode.core.scores.answers import Answers, Window, WindowSource, prescribed_batches
from scoremode.values import Bools, Ids, Ints

StepRow = tuple[int, int]
"""The place of a window in its batch, and the number of a row among the rows that the window asks for."""


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """The tokens that go through a model in one pass: equally many of each of some windows, from one position on."""

    places: list[int]  # (windows,) of the windows in their batch
    ids: Ids  # (windows, tokens)
    begin: int  # position of the first tokens
    is_step: bool  # one token of every window that has not ended, as text is generated; else a part of the prefill
    rows: list[StepRow]  # (rows,) the requested rows that this pass computes
    lines: Ints  # (rows,) the line of each requested row among the windows * tokens lines of the pass


def feeds(windows: Sequence[Window], prefill_tokens: int, at_once: int) -> Iterator[Feed]:
    """Yields the passes that decode windows side by side, with at most ``at_once`` tokens in a pass of the prefill."""
    prefilled = prefill_tokens if prefill_tokens > 1 else 0  # one token is a step, too
    for place, window in enumerate(windows):
        end = min(prefilled, len(window.ids))
        for begin in range(0, end, at_once):
            yield _feed(windows, [place], begin, min(begin + at_once, end), is_step=False)
    for at in range(prefilled, max(len(window.ids) for window in windows)):
        places = [place for place, window in enumerate(windows) if at < len(window.ids)]
        yield _feed(windows, places, at, at + 1, is_step=True)


def _feed(windows: Sequence[Window], places: list[int], begin: int, end: int, *, is_step: bool) -> Feed:
    rows: list[StepRow] = []
    lines: list[int] = []
    for number, place in enumerate(places):
        requested = windows[place].rows
        inside = range(*np.searchsorted(requested, [begin, end]).tolist())
        rows += [(place, row) for row in inside]
        lines += [number * (end - begin) + int(requested[row]) - begin for row in inside]
    ids = np.stack([windows[place].ids[begin:end] for place in places])
    return Feed(places, ids, begin, is_step, rows, np.array(lines, np.int64))


class StepReducer:
    """Reduces the logits of windows that are decoded side by side, step by step."""

    def __init__(self, reducer: LogitsReducer, windows: Sequence[IndexedWindow]) -> None:
        self.reducer, self.windows = reducer, windows
        self._rows_of: list[RowsOf] = []  # what the baseline gives for the rows of each window
        if reducer.against is not None:
            self._rows_of = [reducer.against.window(*indexed) for indexed in windows]
        self._wanted = sum(len(window.rows) for _, window in windows)
        self._order: list[StepRow] = []
        self._parts: list[Reduced] = []

    def reduce(self, rows: Sequence[StepRow], logits: Tensor) -> None:
        """Reduces the logits (n, vocabulary) of some rows. May overwrite the logits."""
        found = np.stack([self.windows[place][1].targets[row] for place, row in rows]).astype(np.int64)
        targets = torch.from_numpy(found).to(self.reducer.device)
        for block in self.reducer.blocks(len(rows)):
            kept = None
            if self._rows_of:
                kept = torch.cat([self._rows_of[place](slice(row, row + 1)) for place, row in rows[block]])
            self._parts.append(self.reducer.reduce_block(logits[block].float(), targets[block], kept))
        self._order += rows

    @property
    def share_done(self) -> float:
        """The share of the rows of all windows that were reduced."""
        return len(self._order) / max(1, self._wanted)

    @property
    def is_complete(self) -> bool:
        """Were all rows of all windows reduced?"""
        return len(self._order) == self._wanted

    def answers(self) -> Iterator[tuple[int, Answers]]:
        """Yields the index and the answers of each window."""
        assert self.is_complete, "a row that no step gave"
        together = dict(self.reducer.answers(self._parts, self.windows[0][1].targets.shape[1]).arrays())
        place, row = np.array(self._order, np.int64).reshape(-1, 2).T
        order, end = np.lexsort((row, place)), 0
        for index, window in self.windows:
            own = order[end : (end := end + len(window.rows))]
            yield index, Answers(**{name: column[own] for name, column in together.items()})


@torch.inference_mode()
def _reduced(engine: Engine, reducer: LogitsReducer, windows: Sequence[IndexedWindow]) -> list[tuple[int, Answers]]:
    together, tokens = StepReducer(reducer, windows), sum(len(window.ids) for _, window in windows)
    for rows, logits in engine.steps([window for _, window in windows]):
        together.reduce(rows, logits)
        if engine.watch is not None:
            engine.watch(int(tokens * together.share_done))
    return list(together.answers())


class StepEngine(Engine):
    """An engine that decodes windows side by side, in batches that are computed whole."""

    def batches(self, source: WindowSource) -> list[Ints] | None:
        if self.path is None:
            return None
        return prescribed_batches(source) or batches_side_by_side(source, self.path.sequences)


def score_side_by_side(
    engine: Engine, source: WindowSource, done: Bools, reducer: LogitsReducer
) -> Iterator[tuple[int, Answers]]:
    """Yields the answers of all windows that are not ``done``, decoded in the batches of the engine."""
    for batch in engine.batches(source) or ():
        if not done[batch].all():
            found = _reduced(engine, reducer, [(int(index), source.window(int(index))) for index in batch])
            yield from ((index, answers) for index, answers in found if not done[index])


class LiveSteps(LiveLogits):
    """A baseline that has logits and no hidden states, and takes every step of the decode path beside the candidate.

    The candidate asks for rows in the order of the steps, because both decode the same batches.
    """

    def __init__(self, engine: Engine, plan: WindowSource, keep: KeepAnswers | None = None) -> None:
        super().__init__(engine, plan, keep)
        self._batch_of = {int(index): batch for batch in engine.batches(plan) or () for index in batch}
        self._places: dict[int, int] = {}  # of the windows of the batch that is decoded now
        self._coming: Iterator[dict[StepRow, Tensor]] = iter(())
        self._step: dict[StepRow, Tensor] = {}

    def logits(self, index: int, window: Window) -> Callable[[slice], Tensor]:
        batch = self._batch_of[index]
        if index == batch[0]:
            self._places = {int(one): place for place, one in enumerate(batch)}
            self._coming, self._step = self._steps([(int(one), self.plan.window(int(one))) for one in batch]), {}
        place = self._places[index]
        return lambda rows: torch.stack([self._row(place, row) for row in range(rows.start, rows.stop)])

    def _row(self, place: int, row: int) -> Tensor:
        while (place, row) not in self._step:
            self._step = next(self._coming)
        return self._step[place, row].clone()  # the next step may lie in the same memory

    def _steps(self, windows: list[IndexedWindow]) -> Iterator[dict[StepRow, Tensor]]:
        """Yields the float32 logits of each step by row, until the last row that a window asks for."""
        own: StepReducer | None = None
        seconds, resumed = 0.0, time.perf_counter()
        for rows, logits in self.engine.steps([window for _, window in windows]):
            if self.keep is not None:
                own = own or StepReducer(LogitsReducer(self.plan, SCORES, logits.device, self.vocabulary), windows)
                own.reduce(rows, logits.float().clone())  # a copy: it may be overwritten
            seconds += time.perf_counter() - resumed
            if self.keep is not None and own is not None and own.is_complete:  # the caller may stop after the last row
                for index, answers in own.answers():
                    self.keep(index, answers, seconds / len(windows))
            yield {row: logits[i].float() for i, row in enumerate(rows)}
            resumed = time.perf_counter()
