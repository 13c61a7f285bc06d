"""Stores the scores of an unfinished run, one record per window, so that a kill loses only unfinished windows.

header  = format, identity of the run
record  = COLUMNS_ARE | JSON: the columns of all further records, as in ["logprob", "rank"]; comes first, with the first
          answer, because the header is written before the engine answers
        = number of the window | seconds, then each column in the order of the schema, then those of a divergence
        = number of the window | nothing: discards this window's earlier record; the window is scored again

records.py adds checksums over the header, the number and the body. The caller must hold the folder's lock
(core/store/runs.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.disk.records import RecordFile
from scoremode.core.scores.answers import FAULT, Answers
from scoremode.core.scores.columns import EMPTY, Divergences, Scores
from scoremode.core.scores.packing import flat_columns
from scoremode.core.scores.schema import BUILT_IN, Array, Column, chosen_divergences, contradiction
from scoremode.core.strict_json import parse
from scoremode.errors import EngineError, RunError, listed
from scoremode.values import Bools, Ints

HEADER = {"format": 3}
SECONDS = struct.Struct("<d")
COLUMNS_ARE = (1 << 64) - 1  # used in place of a window's number


class Journal:
    """The scores of one plan so far: in memory, and in one file."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        counts: Ints,
        *,
        with_kl: bool = False,
        least_kl: float = 0.0,
        vocabulary: int | None = None,
    ) -> None:
        """``counts``: how many targets each window has. ``vocabulary``: how many ids the engine has.

        ``least_kl``: the lowest possible divergence. It is below 0 if the baseline was rounded.
        """
        self.path, self.vocabulary = path, vocabulary
        self.with_kl, self.least_kl = with_kl, least_kl
        self.columns: tuple[Column, ...] = ()  # of every record; none until the first record
        self._rows: dict[str, Array] = {}  # (targets,) each; NaN where a window is not scored yet
        self.done: Bools = np.zeros(len(counts), dtype=np.bool_)
        self._counts, self._offsets = counts, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.seconds = 0.0
        self._file = RecordFile(path, {**HEADER, "identity": identity})
        try:
            for window, _, body in self._file.replay():
                self._replay_record(window, body)
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def _replay_record(self, window: int, body: bytes) -> None:
        """Takes over a record. Files are not trusted: its values are checked like those of an engine."""
        try:
            if window == COLUMNS_ARE:
                names = parse(body)
                self._begin((*BUILT_IN.chosen(names), *chosen_divergences(names)))
                problem = BUILT_IN.set_problem(names[: len(BUILT_IN.chosen(names))])
            elif body:
                found = self._split(body, int(self._counts[window]))
                problem = self._problem(found)
                self._take(window, found, SECONDS.unpack_from(body)[0])
            else:
                self.done[window], problem = False, None
        except (ValueError, IndexError, TypeError):  # a length, a window or a name that this run does not have
            problem = "a record does not belong to it"
        if problem is not None:
            raise RunError(f"{self.path} cannot be resumed: {problem}", fix="score again with --fresh")

    def _problem(self, columns: Mapping[str, Array]) -> str | None:
        """The first value that no model can give, in words; None if there is none."""
        return BUILT_IN.impossible_value(columns, self.vocabulary, self.least_kl) or contradiction(columns)

    def _split(self, body: bytes, targets: int) -> dict[str, Array]:
        found, place = {}, SECONDS.size
        for column in self.columns:
            found[column.name] = np.frombuffer(body, column.numpy_type, targets, place)
            place += found[column.name].nbytes
        if place != len(body):
            raise ValueError("a record of another length")
        return found

    def _begin(self, columns: tuple[Column, ...]) -> None:
        """Makes room for the scores of all windows; NaN until filled, so that a gap cannot look like a number."""
        self.columns, count = columns, int(self._offsets[-1])
        self._rows = {c.name: np.full(count, EMPTY[c.dtype], c.numpy_type) for c in columns}

    def _take(self, window: int, found: Mapping[str, Array], seconds: float) -> None:
        begin, end = self._offsets[window : window + 2]
        for name, column in found.items():
            self._rows[name][begin:end] = column
        self.seconds += seconds
        self.done[window] = True

    def add(self, window: int, answers: Answers, seconds: float) -> None:
        """Writes the scores of a window. Raises EngineError if no model can give them."""
        if self.with_kl and answers.kl is None:
            raise _unusable_scores(f"window {window} has no divergence")
        divergences = answers.divergences if self.with_kl else ()
        columns = (*BUILT_IN.chosen(answers.columns), *chosen_divergences(divergences))
        if self.columns and self.columns != columns:
            given = listed([column.name for column in columns])
            raise RunError(
                f"{self.path} has {listed(self.names)} for each target, but the engine now gives {given}",
                fix="score again with --fresh",
            )
        found = flat_columns([answers], columns)
        problem = self._problem(found)
        if problem is not None:
            raise _unusable_scores(f"in window {window} {problem}")
        if not self.columns:
            self._begin(columns)
            self._file.append(COLUMNS_ARE, json.dumps(self.names).encode())
        self._file.append(window, SECONDS.pack(seconds), *(column.data for column in found.values()))
        self._take(window, found, seconds)

    def forget(self, window: int) -> None:
        """Discards a window's scores, because other data of it, such as hidden states, was lost. It is scored again."""
        assert self.done[window], "a window that was never scored"
        self._file.append(window, b"")
        self.done[window] = False
        for column in self.columns:
            begin, end = self._offsets[window : window + 2]
            self._rows[column.name][begin:end] = EMPTY[column.dtype]

    @property
    def scores(self) -> Scores:
        """The scores of all targets so far; NaN for windows that are not scored yet."""
        if not self.columns:
            return Scores(np.full(int(self._offsets[-1]), np.nan))
        return Scores(**{name: self._rows[name] for name in BUILT_IN.names if name in self._rows})

    @property
    def divergences(self) -> Divergences:
        """The divergence of each target as far as it is measured."""
        return Divergences(**{c.name: self._rows[c.name] for c in chosen_divergences(self.names)})

    def close(self) -> None:
        self._file.close()


def _unusable_scores(problem: str) -> EngineError:
    return EngineError(f"the engine gave no usable scores: {problem}", fix=FAULT)
