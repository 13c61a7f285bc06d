"""From logits to answers, for engines that have logits and no hidden states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import SCORES, UNIFORM, Engine, FinalStates, LiveDistributions, Wanted
from scoremode.core.engine.distributions import (
    IndexedWindow,
    RowsOf,
    StatesOnDevice,
    WholeOnDevice,
    records_of_logits,
    split_columns,
    split_divergence,
)
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.errors import ModelError
from scoremode.head.budget import rows_within
from scoremode.head.chunked import columns_of_no_rows, reduce_logits
from scoremode.head.columns import Columns
from scoremode.head.divergence import Divergence
from scoremode.values import Raw


@dataclass(frozen=True, slots=True)
class Reduced:
    """The results of a few rows, still on the device: nothing waits for the device until they are read."""

    found: Columns | Divergence
    records: Raw | None = None


class LogitsReducer:
    """Reduces the logits of a plan's rows to the results that are wanted, a few rows at a time."""

    def __init__(self, source: WindowSource, want: Wanted, device: torch.device, vocabulary: int) -> None:
        self.want, self.device, self.vocabulary = want, device, vocabulary
        self.width = min(source.vocabulary or vocabulary, vocabulary)
        self.against: StatesOnDevice | WholeOnDevice | None = None
        if isinstance(want.against, FinalStates):
            self.against = StatesOnDevice(want.against, device, vocabulary)
        elif want.against is not None:
            self.against = WholeOnDevice(want.against, device, vocabulary)
        self._index = -1  # of the window that is being reduced
        self._rows_of: RowsOf | None = None  # what the baseline gives for its rows

    def reduce(self, indexed: IndexedWindow, rows: slice, logits: Tensor) -> list[Reduced]:
        """Reduce the logits (n, vocabulary) of some rows of a window. May overwrite the logits."""
        targets = torch.from_numpy(indexed[1].targets[rows].astype(np.int64)).to(self.device)
        if self.against is not None and (rows.start == 0 or indexed[0] != self._index):
            self._index, self._rows_of = indexed[0], self.against.window(*indexed)
        found = []
        for block in self.blocks(len(logits)):
            kept = None if self._rows_of is None else self._rows_of(moved(block, rows.start))
            found.append(self.reduce_block(logits[block].float(), targets[block], kept))
        return found

    def blocks(self, rows: int) -> list[slice]:
        """Slices of as many rows as are reduced at a time."""
        step = rows_within(0, self.vocabulary, self.device.type)
        return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]

    def reduce_block(self, logits: Tensor, targets: Tensor, kept: Tensor | None) -> Reduced:
        """Reduce a block of rows; ``kept`` are the baseline's hidden states, records or logits for them."""
        records = records_of_logits(logits) if self.want.records else None
        if self.against is None or kept is None:
            return Reduced(reduce_logits(logits[:, : self.width], targets), records)
        return Reduced(self.against.diverge(kept, logits, targets, self.width), records)

    def answers(self, parts: list[Reduced], targets_per_row: int) -> Answers:
        """The answers of one window, joined from the parts of its rows."""
        apart = [part.found for part in parts if isinstance(part.found, Divergence)]
        columns = [part.found for part in parts if isinstance(part.found, Columns)]
        if apart:
            divergence = Divergence.cat(apart)
            (answers,) = split_divergence(divergence, np.array([len(divergence.kl)]))
        else:
            nothing = torch.zeros(0, targets_per_row, dtype=torch.int64, device=self.device)
            whole = Columns.cat(columns) if columns else columns_of_no_rows(nothing)
            (answers,) = split_columns(whole, np.array([len(whole.logprob)]))
        records = [part.records for part in parts if part.records is not None]
        return replace(answers, records=np.concatenate(records) if records else None)


def moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


# ── a baseline ───────────────────────────────────────────────────────────────────────────────────────────────────────
KeepAnswers = Callable[[int, Answers, float], None]
"""Is given the index of a window, the answers to it, and the seconds that they took."""


class LiveLogits(LiveDistributions):
    """A baseline that has logits and no hidden states, and runs at the same time as the candidate.

    A window is computed when the candidate asks for it, and no logits outlive its blocks. With ``keep``, the baseline's
    own scores are computed from the same logits. With ``whole_windows``, the logits of a window are held, for a
    candidate that decodes several windows side by side: it needs the rows of all windows of a batch at once.
    """

    def __init__(
        self, engine: Engine, plan: WindowSource, keep: KeepAnswers | None = None, *, whole_windows: bool = False
    ) -> None:
        self.engine, self.plan, self.keep, self.whole_windows = engine, plan, keep, whole_windows
        self.vocabulary = engine.facts.known_vocabulary

    def logits(self, index: int, window: Window) -> Callable[[slice], Tensor]:
        blocks = self._blocks(index, window)
        if not self.whole_windows:
            return LogitsCursor(blocks).rows
        whole = torch.cat([block.clone() for _, block in blocks])
        return lambda rows: whole[rows]

    def _blocks(self, index: int, window: Window) -> Iterator[tuple[slice, Tensor]]:
        """Yields float32 logits of a few rows at a time, with their places among the rows of the window."""
        parts: list[Reduced] = []
        seconds, resumed = 0.0, time.perf_counter()
        for rows, logits in self.engine.logits(window):
            reducer = LogitsReducer(self.plan, SCORES, logits.device, self.vocabulary)
            for block in reducer.blocks(len(logits)):
                place, found = moved(block, rows.start), logits[block].float()
                if self.keep is not None:
                    parts += reducer.reduce((index, window), place, found.clone())  # a copy: it may be overwritten
                if self.keep is not None and place.stop == len(window.rows):  # nobody may ask for more rows
                    answers = reducer.answers(parts, window.targets.shape[1])
                    self.keep(index, answers, seconds + time.perf_counter() - resumed)
                seconds += time.perf_counter() - resumed
                yield place, found
                resumed = time.perf_counter()


class LogitsCursor:
    """Reads the rows of a window from blocks of logits, in order; blocks and requests may be of different lengths."""

    def __init__(self, blocks: Iterator[tuple[slice, Tensor]]) -> None:
        self._blocks, self._place = blocks, slice(0, 0)
        self._block: Tensor | None = None

    def rows(self, wanted: slice) -> Tensor:
        """The logits of some rows, valid until the next call."""
        parts: list[Tensor] = []
        at: int = wanted.start
        while at < wanted.stop:
            while at >= self._place.stop:
                parts = [part.clone() for part in parts]  # the next block may lie in the same memory
                self._place, self._block = next(self._blocks)
            assert self._block is not None
            assert at >= self._place.start, "rows are asked for in order"
            end = min(wanted.stop, self._place.stop)
            parts.append(self._block[at - self._place.start : end - self._place.start])
            at = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def judge_probe(logits: Tensor, earlier: Tensor, slack: float) -> tuple[str, ...]:
    """Notes on a model, from its logits on a probe; an error if it is not causal and so cannot be scored.

    ``earlier`` are the logits of all rows but the last, computed with a different last token. That may change them by
    at most ``slack`` of the largest logit.
    """
    moved = (earlier - logits[:-1]).abs()
    if moved.numel() and float(moved.max() / logits.abs().max().clamp_min(1.0)) > slack:
        raise ModelError("the model's rows depend on the tokens after them", fix="choose a causal language model")
    return (UNIFORM,) if bool((logits == logits[:, :1]).all()) else ()
