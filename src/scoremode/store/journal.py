"""The scores of an unfinished run, one record per window, so that a killed run loses only unfinished windows.

header  = format, identity of the run
record  = number of the window | seconds, then logprob rank entropy top top_logprob [kl], one column after the other
        = number of the window | nothing: discards this window's earlier record; the window is scored again
        = COLUMNS_ARE | JSON: the columns that the engine gives, as in ["logprob", "rank"]

The header is written before the engine answers, so it cannot name the columns. If the first answer lacks some columns,
the first record names those that it has, and all other records have exactly these. Without such a record all columns
are present: a journal with all columns is byte for byte the same as before columns became optional. One journal never
mixes records with different columns. An older scoremode refuses COLUMNS_ARE as an impossible window.

records.py adds checksums over the header, the number and the body. They cannot detect a record that was written with
an impossible value, so every record is also checked for those. Scores are not kept in memory: ``rows`` reads them from
the file. The caller holds the folder's lock (runs.py).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scoremode.errors import EngineError, RunError
from scoremode.plan.plan import Plan
from scoremode.plan.windows import Answers, column_set_problem, joined_names
from scoremode.store.records import MAGIC, RecordFile, read_record_header
from scoremode.store.scores import Scores
from scoremode.text.json_files import parse
from scoremode.values import Bools, Floats, Ints

FORMAT = 2
SECONDS = struct.Struct("<d")
RECORD_COLUMNS = (("logprob", "<f8"), ("rank", "<i8"), ("entropy", "<f8"), ("top", "<i4"), ("top_logprob", "<f8"))
KL = ("kl", "<f8")
NAMES = tuple(name for name, _ in RECORD_COLUMNS)
COLUMNS_ARE = (1 << 64) - 1  # used in place of a window's number
ROUNDING = 1e-4
"""Nats by which a log-probability may exceed 0. The target's logit and the largest logit may come from two float32
products that round differently. scoremode's heads give at most 0 on a CPU; their self-test allows an error of 1e-4."""
SLACK = 1e-2
"""Nats by which columns may contradict each other, and an entropy its bound: servers may round as they like."""
MOST_IDS = 1 << 31  # ids are int32
OLD_MAGIC = b"scor"  # records of format 1
FIRST_BYTES = 1 << 20

Column = npt.NDArray[Any]


class Layout(NamedTuple):
    """What a record's body consists of, after the seconds."""

    columns: tuple[tuple[str, str], ...]  # names and types
    row_bytes: int  # of one target


class Journal:
    """The scores of one plan so far, kept in one file."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        plan: Plan,
        *,
        with_kl: bool = False,
        least_kl: float = 0.0,
        vocabulary: int | None = None,
    ) -> None:
        """``vocabulary``: how many ids the engine has; a record with a larger id is refused.

        ``least_kl``: the least divergence that is possible; below 0 if the baseline was rounded.
        """
        self.least_kl = least_kl
        self.plan = plan
        self.path = path
        self.vocabulary = vocabulary
        self.with_kl = with_kl
        self.measured: tuple[str, ...] | None = None  # columns of every record; None until the first record
        self._layout: tuple[tuple[str, ...] | None, Layout] | None = None
        self._from_file = False  # were the columns read from the file, not given by this engine?
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

    def _replay_record(self, window: int, at: int, body: bytes) -> None:
        """Process a record that was read from the file."""
        if window == COLUMNS_ARE and self.measured is None:
            problem = self._learn_columns(body)
        else:
            self.measured, self._from_file = self.measured or NAMES, True
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
        """Learn which columns the records have; return what is wrong, if anything."""
        try:
            given = parse(body)
        except ValueError:
            given = None
        named = tuple(name for name in NAMES if isinstance(given, list) and name in given)
        if not isinstance(given, list) or list(named) != given or named == NAMES:
            return "its list of columns is damaged"
        problem = column_set_problem(named)
        if problem is None:
            self.measured, self._from_file = named, True
        return problem

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types of a record's columns, in order."""
        return self._record_layout().columns

    def _record_layout(self) -> Layout:
        if self._layout is None or self._layout[0] != self.measured:  # asked for every record
            kept = tuple(column for column in RECORD_COLUMNS if column[0] in (self.measured or NAMES))
            columns = (*kept, KL) if self.with_kl else kept
            self._layout = self.measured, Layout(columns, sum(np.dtype(dtype).itemsize for _, dtype in columns))
        return self._layout[1]

    def _record_problem(self, window: int, body: bytes) -> str | None:
        """What is wrong with a record whose checksum is right, in words; None if nothing is."""
        if window >= len(self.plan):
            return f"it has window {window} of {len(self.plan)}"
        if not body:
            return None if self.done[window] else f"it discards window {window}, which it does not have"
        if len(body) != SECONDS.size + int(self._counts[window]) * self._record_layout().row_bytes:
            return self._known(window) or f"its record of window {window} has the wrong length"
        columns = self._split(body, int(self._counts[window]))
        return self._known(window) or self._impossible(window, SECONDS.unpack_from(body)[0], columns)

    def _known(self, window: int) -> str | None:
        return f"it has window {window} twice" if self.done[window] else None

    def _impossible(self, window: int, seconds: float, columns: Mapping[str, Column]) -> str | None:
        """The first value of a window that cannot be, in words."""
        if not 0 <= seconds < math.inf:
            return f"window {window} took an impossible time"
        problem = impossible_value(columns, self.vocabulary, self.least_kl) or contradiction(columns)
        return None if problem is None else f"in window {window} {problem}"

    def _split(self, body: bytes, targets: int) -> dict[str, Column]:
        found, place = {}, SECONDS.size
        for name, dtype in self.columns:
            found[name] = np.frombuffer(body, dtype, targets, place)
            place += found[name].nbytes
        return found

    def _index_record(self, window: int, at: int, seconds: float) -> None:
        """Remember where this window's record is."""
        self.seconds += seconds
        self._at[window] = at
        self.done[window] = True

    def add(self, window: int, answers: Answers, seconds: float) -> None:
        """Append a window's scores."""
        begins = self.measured is None
        self._require_same_columns(window, answers)
        columns = {
            name: np.ascontiguousarray(_one_target(getattr(answers, name)), dtype=dtype) for name, dtype in self.columns
        }
        problem = self._unusable(window, seconds, columns)
        if problem is not None:
            raise _unusable_scores(problem)
        if begins and self.measured != NAMES:
            self._file.append(COLUMNS_ARE, json.dumps(self.measured).encode())
        at = self._file.append(window, SECONDS.pack(seconds), *(column.data for column in columns.values()))
        self._index_record(window, at, seconds)

    def _unusable(self, window: int, seconds: float, columns: Mapping[str, Column]) -> str | None:
        """What is wrong with a window's scores, in words; None if nothing is."""
        if window >= len(self.plan):
            return f"it has window {window} of {len(self.plan)}"
        targets = int(self._counts[window])
        if any(len(column) != targets for column in columns.values()):
            return self._known(window) or f"its record of window {window} has the wrong length"
        return self._known(window) or self._impossible(window, seconds, columns)

    def _require_same_columns(self, window: int, answers: Answers) -> None:
        """Refuse an answer whose columns differ from those of the first answer."""
        problem = column_set_problem(answers.columns)
        if self.with_kl and answers.kl is None:
            problem = f"window {window} has no divergence"
        if problem is not None:
            raise _unusable_scores(problem)
        self.measured = self.measured or answers.columns
        if self.measured == answers.columns:
            return
        given, known = joined_names(answers.columns), joined_names(self.measured)
        if self._from_file:
            raise RunError(
                f"{self.path} has {known} for each target, but the engine now gives {given}",
                fix="score again with --fresh",
            )
        raise _unusable_scores(f"window {window} has {given}, and windows before it have {known}")

    def forget(self, window: int) -> None:
        """Discard a window's scores, because data that belongs to them elsewhere was lost; it is scored again."""
        assert self.done[window], "a window that was never scored"
        self._file.append(window, b"")
        self.done[window] = False

    def rows(self, begin: int, end: int) -> Scores:
        """The scores of consecutive targets, from whole windows; NaN for windows that are not scored yet."""
        return self.rows_and_kl(begin, end)[0]

    def rows_and_kl(self, begin: int, end: int) -> tuple[Scores, Floats | None]:
        """As ``rows``, and the divergence of each target, if there is one."""
        offsets = self.plan.target_offsets
        found = Scores.empty(end - begin, self.measured or NAMES[:1])
        kl = np.full(end - begin, np.nan) if self.with_kl else None
        into = dict(found.columns()) | ({} if kl is None else {"kl": kl})
        for window in range(*np.searchsorted(offsets, (begin, end)).tolist()):
            if not self.done[window]:
                continue
            row, n = int(offsets[window]) - begin, int(self._counts[window])
            columns = self._split(self._file.body(int(self._at[window]), window), n)
            for name, column in into.items():
                column[row : row + n] = columns[name]
        return found, kl

    def close(self) -> None:
        self._file.close()


def _unusable_scores(problem: str) -> EngineError:
    return EngineError(f"the engine gave no usable scores: {problem}", fix="this is a fault of the engine")


def _one_target(column: Column) -> Column:
    """A column of a plan's window, which has one target per row: (m, 1) and (m,) both become (m,)."""
    return column[:, 0] if column.ndim == 2 else column


def impossible_value(columns: Mapping[str, Column], vocabulary: int | None = None, least_kl: float = 0.0) -> str | None:
    """The first value that no model can give, in words; None if all values are possible.

    Minus infinity is allowed, as a probability of zero; so is an infinite divergence.
    """
    highest = math.inf if vocabulary is None else vocabulary
    bounds = {
        "logprob": (-math.inf, ROUNDING),
        "rank": (1, highest),
        "entropy": (-ROUNDING, math.log(vocabulary or MOST_IDS) + SLACK),  # largest if all ids are as likely
        "top": (0, highest - 1),
        "top_logprob": (-math.inf, ROUNDING),
        "kl": (least_kl, math.inf),
    }
    for name, column in columns.items():
        least, most = bounds[name]
        if not len(column):
            continue
        low, high = np.minimum.reduce(column), np.maximum.reduce(column)  # NaN if one of the values is
        finite = name not in ("entropy", "top_logprob") or (low > -math.inf and high < math.inf)
        if low >= least and high <= most and finite:
            continue
        bad = ~((column >= least) & (column <= most))  # written so that NaN is bad too
        if not finite:
            bad |= np.isinf(column)
        return f"{name.replace('_', ' ')} is {column[bad][0]:g}"
    return None


def contradiction(columns: Mapping[str, Column]) -> str | None:
    """The first value that cannot be beside another one of its target, in words; None if there is none.

    No token is more likely than the first choice. The entropy is the mean of -log p, so at least -log p of that one.
    """
    top = columns.get("top_logprob")
    if top is None or not len(top):
        return None
    logprob, entropy = columns["logprob"], columns.get("entropy")
    if (bad := logprob > top + SLACK).any():
        return f"top logprob is {top[bad][0]:g}, below the logprob {logprob[bad][0]:g} of a token"
    if entropy is not None and (bad := entropy < -top - SLACK).any():
        return f"entropy is {entropy[bad][0]:g}, and top logprob {top[bad][0]:g}"
    return None


def header(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a journal's first line."""
    return {"format": FORMAT, "identity": identity}


def first_line(identity: Mapping[str, Any]) -> bytes:
    """A journal without records, as bytes."""
    return json.dumps(header(identity), sort_keys=True, allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """What can be read from a journal without its plan."""

    identity: dict[str, Any] | None  # of its run; None if it cannot be read
    older: bool  # written in a format that is no longer supported
    begun: bytes | None  # the whole content if the file has no records, else None
    ours: bool  # only scoremode writes such a file


def inspect_journal(path: Path) -> JournalFacts:
    """Inspect the file at a journal's path, which may be missing or damaged."""
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


def read_identity(path: Path) -> dict[str, Any] | None:
    """The identity of the run that a journal belongs to; None if it was not written completely."""
    return inspect_journal(path).identity
