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
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from scoremode.core.disk.records import RecordFile
from scoremode.core.scores.answers import Answers
from scoremode.core.scores.columns import Divergences, Scores
from scoremode.core.scores.schema import BUILT_IN, Array, ColumnSpec, chosen_divergences
from scoremode.core.strict_json import parse
from scoremode.errors import RunError, listed
from scoremode.values import Bools, Ints

HEADER = {"format": 3}
SECONDS = struct.Struct("<d")
COLUMNS_ARE = (1 << 64) - 1  # used in place of a window's number


class Journal:
    """The scores of one plan so far: in memory, and in one file."""

    def __init__(self, path: Path, identity: Mapping[str, object], counts: Ints) -> None:
        """``counts``: how many targets each window has."""
        self.path = path
        self.columns: tuple[ColumnSpec, ...] = ()  # of every record; none until the first record
        self.names: tuple[str, ...] = ()
        self.done: Bools = np.zeros(len(counts), dtype=np.bool_)
        self._counts = counts
        self._found: list[dict[str, Array]] = [{}] * len(counts)  # columns of each window; none: it is not scored yet
        self.seconds = 0.0
        self._file = RecordFile(path, {**HEADER, "identity": identity})
        try:
            for window, _, body in self._file.replay():
                self._replay_record(window, body)
        except BaseException:
            self._file.close()
            raise

    def _replay_record(self, window: int, body: bytes) -> None:
        """Takes over a record. Its checksum was right, and its values were checked before it was written."""
        try:
            if window == COLUMNS_ARE:
                names = parse(body)
                self._begin(names)
            else:
                self._take(window, self._split(body, int(self._counts[window])) if body else {})
                self.seconds += SECONDS.unpack_from(body)[0] if body else 0.0
        except (ValueError, IndexError, TypeError):  # a length, a window or a name that this run does not have
            problem = "a record does not belong to it"
            raise RunError(f"{self.path} cannot be resumed: {problem}", fix="score again with --fresh") from None

    def _split(self, body: bytes, targets: int) -> dict[str, Array]:
        arrays, place = {}, SECONDS.size
        for column in self.columns:
            arrays[column.name] = np.frombuffer(body, column.numpy_type, targets, place)
            place += arrays[column.name].nbytes
        if place != len(body):
            raise ValueError("a record of another length")
        return arrays

    def _begin(self, names: Sequence[str]) -> None:
        self.columns = (*BUILT_IN.chosen(names), *chosen_divergences(names))
        self.names = tuple(column.name for column in self.columns)

    def _take(self, window: int, arrays: dict[str, Array]) -> None:
        self._found[window], self.done[window] = arrays, bool(arrays)

    def add(self, window: int, answers: Answers, seconds: float) -> None:
        """Writes the scores of a window, which were checked by ``check_answers``."""
        names = (*answers.columns, *answers.divergences)
        if not self.columns:
            self._begin(names)
            self._file.append(COLUMNS_ARE, json.dumps(self.names).encode())
        elif self.names != names:
            raise RunError(
                f"{self.path} has {listed(self.names)} for each target, but the engine now gives {listed(names)}",
                fix="score again with --fresh",
            )
        arrays = {c.name: np.ascontiguousarray(getattr(answers, c.name), c.numpy_type).ravel() for c in self.columns}
        self._file.append(window, SECONDS.pack(seconds), *(column.data for column in arrays.values()))
        self._take(window, arrays)
        self.seconds += seconds

    def forget(self, window: int) -> None:
        """Discards a window's scores, because other data of it, such as hidden states, was lost. It is scored again."""
        assert self.done[window], "a window that was never scored"
        self._file.append(window, b"")
        self._take(window, {})

    @property
    def scores(self) -> Scores:
        """The scores of all targets, once every window is scored."""
        return Scores(**self._joined(BUILT_IN.chosen(self.names)))

    @property
    def divergences(self) -> Divergences:
        """The divergence of each target as far as it is measured."""
        return Divergences(**self._joined(chosen_divergences(self.names)))

    def _joined(self, columns: tuple[ColumnSpec, ...]) -> dict[str, Array]:
        assert self.done.all(), "a window without scores"
        return {c.name: np.concatenate([arrays[c.name] for arrays in self._found]) for c in columns}

    def close(self) -> None:
        self._file.close()
