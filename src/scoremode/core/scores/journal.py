"""Stores the scores of an unfinished run, one record per window, so that a kill loses only unfinished windows.

header  = format, identity of the run
record  = number of the window | seconds, then each column in the order of the schema, then those of a divergence
        = number of the window | nothing: discards this window's earlier record; the window is scored again
        = COLUMNS_ARE | JSON: the columns that the engine gives, as in ["logprob", "rank"]

The header is written before the engine answers, so it cannot name the columns. If the columns of the first answer are
not exactly the built-in ones, the first record names them, and all other records have exactly these columns. Without
such a record, all built-in columns are present, and the journal has the same bytes as before columns became optional.
If a divergence is measured and the list names none of its columns, there is only kl: all that there once was. Such a
journal is resumed without the other columns.
One journal never mixes records with different columns. An older scoremode refuses COLUMNS_ARE as an impossible window.

records.py adds checksums over the header, the number and the body. Checksums cannot detect an impossible value that was
written as such, so the values of every record are checked, too. Scores are not held in memory: ``rows`` reads them
from the file. The caller must hold the folder's lock (core/store/runs.py).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scoremode.core.disk.records import MAGIC, RecordFile, read_record_header
from scoremode.core.scores.answers import FAULT, Answers
from scoremode.core.scores.columns import Divergences, Scores
from scoremode.core.scores.packing import flat_columns
from scoremode.core.scores.schema import (
    BUILT_IN,
    KL,
    Array,
    Column,
    chosen_divergences,
    contradiction,
)
from scoremode.core.strict_json import parse
from scoremode.errors import EngineError, RunError, listed
from scoremode.values import Bools, Ints

FORMAT = 2
SECONDS = struct.Struct("<d")
COLUMNS_ARE = (1 << 64) - 1  # used in place of a window's number
OLD_MAGIC = b"scor"  # records of format 1
FIRST_BYTES = 1 << 20


class PlannedTargets(Protocol):
    """The facts about a plan that a journal needs."""

    def __len__(self) -> int: ...  # windows

    @property
    def targets(self) -> int: ...  # targets of all windows

    @property
    def target_counts(self) -> Ints: ...  # (windows,)

    @property
    def target_offsets(self) -> Ints: ...  # (windows + 1,)


class Journal:
    """The scores of one plan so far, stored in one file."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        plan: PlannedTargets,
        *,
        with_kl: bool = False,
        least_kl: float = 0.0,
        vocabulary: int | None = None,
    ) -> None:
        """``vocabulary``: how many ids the engine has. A record with a larger id is refused.

        ``least_kl``: the lowest possible divergence. It is below 0 if the baseline was rounded.
        """
        self.path, self.plan, self.vocabulary = path, plan, vocabulary
        self.with_kl, self.least_kl = with_kl, least_kl
        self._only_kl = (KL.name,) if with_kl else ()  # columns of a divergence, unless others are named
        self.measured: tuple[str, ...] | None = None  # columns of every record; None until the first record
        self._use_columns(BUILT_IN.names, self._only_kl)
        self.left_out: tuple[str, ...] = ()  # columns of a divergence that the engine gives and the file cannot have
        self._from_file = False  # were the columns read from the file, instead of given by this engine?
        self.done: Bools = np.zeros(len(plan), dtype=np.bool_)
        self._counts: Ints = plan.target_counts
        self._at: Ints = np.zeros(len(plan), dtype=np.int64)  # offset of each window's record in the file
        self.seconds = 0.0
        self._file = RecordFile(path, header(identity))
        try:
            for window, at, body in self._file.replay():
                self._replay_record(window, at, body)
        except BaseException:
            self._file.close()
            raise

    def _use_columns(self, names: tuple[str, ...], divergences: tuple[str, ...]) -> None:
        """Sets the columns of every record from now on: scores, and those of a divergence."""
        self.divergences = divergences
        self.columns: tuple[Column, ...] = (*BUILT_IN.chosen(names), *chosen_divergences(divergences))
        self._row_bytes = sum(column.numpy_type.itemsize for column in self.columns)

    def _replay_record(self, window: int, at: int, body: bytes) -> None:
        if window == COLUMNS_ARE and self.measured is None:
            problem = self._learn_columns(body)
        else:
            self.measured, self._from_file = self.measured or BUILT_IN.names, True
            problem = self._record_problem(window, body)
        if problem is not None:
            raise RunError(f"{self.path} cannot be resumed: {problem}", fix="score again with --fresh")
        if window == COLUMNS_ARE:
            return
        if body:
            self._index_record(window, at, SECONDS.unpack_from(body)[0])
        else:
            self.done[window] = False

    def _learn_columns(self, body: bytes) -> str | None:
        """Reads which columns the records have. Returns the problem in words, or None."""
        try:
            given = parse(body)
        except ValueError:
            given = None
        listed = given if isinstance(given, list) else []
        named = tuple(name for name in BUILT_IN.names if name in listed)
        apart = tuple(column.name for column in chosen_divergences(listed))
        is_default = named == BUILT_IN.names and not apart
        is_possible = not apart or (self.with_kl and KL.name in apart)
        if given != [*named, *apart] or is_default or not is_possible:
            return "its list of columns is damaged"
        problem = BUILT_IN.set_problem(named)
        if problem is None:
            self.measured, self._from_file = named, True
            self._use_columns(named, apart or self._only_kl)
        return problem

    def _record_problem(self, window: int, body: bytes) -> str | None:
        """Returns the problem of a record whose checksum is right, in words, or None if the record is valid."""
        if window >= len(self.plan):
            return f"it has window {window} of {len(self.plan)}"
        if not body:
            return None if self.done[window] else f"it discards window {window}, which it does not have"
        if self.done[window]:
            return f"it has window {window} twice"
        targets = int(self._counts[window])
        if len(body) != SECONDS.size + targets * self._row_bytes:
            return f"its record of window {window} has the wrong length"
        (seconds,) = SECONDS.unpack_from(body)
        if not 0 <= seconds < math.inf:
            return f"window {window} took an impossible time"
        columns = self._split(body, targets)
        problem = BUILT_IN.impossible_value(columns, self.vocabulary, self.least_kl) or contradiction(columns)
        return None if problem is None else f"in window {window} {problem}"

    def _split(self, body: bytes, targets: int) -> dict[str, Array]:
        found, place = {}, SECONDS.size
        for column in self.columns:
            found[column.name] = np.frombuffer(body, column.numpy_type, targets, place)
            place += found[column.name].nbytes
        return found

    def _index_record(self, window: int, at: int, seconds: float) -> None:
        self.seconds += seconds
        self._at[window] = at
        self.done[window] = True

    def add(self, window: int, answers: Answers, seconds: float) -> None:
        begins = self.measured is None
        self._require_same_columns(window, answers)
        columns = flat_columns([answers], self.columns)
        body = b"".join((SECONDS.pack(seconds), *(column.data for column in columns.values())))
        problem = self._record_problem(window, body)
        if problem is not None:
            raise _unusable_scores(problem)
        listed = (*(self.measured or ()), *(self.divergences if self.divergences != self._only_kl else ()))
        if begins and listed != BUILT_IN.names:
            self._file.append(COLUMNS_ARE, json.dumps(listed).encode())
        self._index_record(window, self._file.append(window, body), seconds)

    def _require_same_columns(self, window: int, answers: Answers) -> None:
        """Raises an error if the columns of an answer differ from those of the first answer."""
        names, divergences = BUILT_IN.in_order(answers.columns), answers.divergences if self.with_kl else ()
        problem = BUILT_IN.set_problem(answers.columns)
        if self.with_kl and answers.kl is None:
            problem = f"window {window} has no divergence"
        if problem is not None:
            raise _unusable_scores(problem)
        if self.measured is None:
            self.measured = names
            self._use_columns(names, divergences)
        if self._from_file and self.divergences == self._only_kl:
            self.left_out = divergences[1:]  # an older scoremode began the run, which does not have these
            divergences = self._only_kl
        if self.measured == names and self.divergences == divergences:
            return
        given, known = listed((*names, *divergences)), listed((*self.measured, *self.divergences))
        if self._from_file:
            raise RunError(
                f"{self.path} has {known} for each target, but the engine now gives {given}",
                fix="score again with --fresh",
            )
        raise _unusable_scores(f"window {window} has {given}, and windows before it have {known}")

    def forget(self, window: int) -> None:
        """Discards a window's scores, because other data of it, such as hidden states, was lost. It is scored again."""
        assert self.done[window], "a window that was never scored"
        self._file.append(window, b"")
        self.done[window] = False

    def rows(self, begin: int, end: int) -> Scores:
        """Returns the scores of consecutive targets, from whole windows; NaN for windows that are not scored yet."""
        return self.rows_and_divergences(begin, end)[0]

    def rows_and_divergences(self, begin: int, end: int) -> tuple[Scores, Divergences]:
        """Returns the scores that ``rows`` returns, and the divergence of each target as far as it is measured."""
        offsets = self.plan.target_offsets
        found = Scores.empty(end - begin, BUILT_IN.chosen(self.measured or ("logprob",)))
        apart = Divergences.empty(end - begin, chosen_divergences(self.divergences))
        into = dict(found.columns()) | dict(apart.columns())
        for window in range(*np.searchsorted(offsets, (begin, end)).tolist()):
            if not self.done[window]:
                continue
            row, n = int(offsets[window]) - begin, int(self._counts[window])
            columns = self._split(self._file.body(int(self._at[window]), window), n)
            for name, column in into.items():
                column[row : row + n] = columns[name]
        return found, apart

    def close(self) -> None:
        self._file.close()


def _unusable_scores(problem: str) -> EngineError:
    return EngineError(f"the engine gave no usable scores: {problem}", fix=FAULT)


def header(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a journal's first line."""
    return {"format": FORMAT, "identity": identity}


def first_line(identity: Mapping[str, Any]) -> bytes:
    """Returns a journal without records, as bytes."""
    return json.dumps(header(identity), sort_keys=True, allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """The facts that can be read from a journal without its plan."""

    identity: dict[str, Any] | None  # identity of its run; None if it cannot be read
    older: bool  # written in a format that is no longer supported
    begun: bytes | None  # the whole content if the file has no records, else None
    ours: bool  # did scoremode write this file? No other program writes such files


def inspect_journal(path: Path) -> JournalFacts:
    """Inspects the file at a journal's path, which may be missing or damaged."""
    if not path.is_file():
        return JournalFacts(identity=None, older=False, begun=None, ours=False)
    with path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    known = read_record_header(path) or {}
    rest = start.partition(b"\n")[2]
    older = {"model", "plan", "engine"} <= known.keys() or (
        type(known.get("format")) is int and known["format"] != FORMAT
    )
    identity = None if older else known.get("identity")
    return JournalFacts(
        identity=identity if isinstance(identity, dict) else None,
        older=older,
        begun=start if not rest else None,
        ours=older
        or isinstance(identity, dict)
        or first_line({}).startswith(start[:20])
        or any(magic in start for magic in (MAGIC, OLD_MAGIC)),
    )
