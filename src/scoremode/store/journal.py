"""Scores on their way to disk, one record per window, so that a killed run loses only what was in flight.

header  = format, identity of the run
record  = number of the window | seconds, then logprob rank entropy top top_logprob [kl], one column after the other
        = number of the window | nothing: this window's scores so far do not count, it is scored again

records.py holds the file together: its checksums cover the header, the number and the body. What they cannot see is a
record that was written with something impossible in it, so every record is also checked for that. Scores are not held
in memory beside the file: ``rows`` reads them back. The caller holds the folder's lock (runs.py).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.errors import EngineError, RunError
from scoremode.plan.plan import Plan
from scoremode.plan.windows import Answers, measured
from scoremode.store.records import MAGIC, RecordFile, read_header
from scoremode.store.scores import Scores
from scoremode.values import Bools, Floats, Ints

FORMAT = 2
SECONDS = struct.Struct("<d")
COLUMNS = (("logprob", "<f8"), ("rank", "<i8"), ("entropy", "<f8"), ("top", "<i4"), ("top_logprob", "<f8"))
KL = ("kl", "<f8")
ROUNDING = 1e-4
"""Nats by which a log-probability may exceed 0. The target's logit and the largest logit may come from two products in
float32 that round differently; the heads here give at most 0 on a CPU, and 1e-4 is what their probe allows them."""
OLD_MAGIC = b"scor"  # records of format 1
FIRST_BYTES = 1 << 20

Column = npt.NDArray[Any]


class Journal:
    """Scores so far of one plan, kept in one file."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        plan: Plan,
        *,
        with_kl: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        """``vocabulary``: how many ids the engine knows; a record that names another id is refused."""
        self.plan = plan
        self.path = path
        self.vocabulary = vocabulary
        self.kl: Floats | None = np.full(plan.targets, np.nan) if with_kl else None
        self.columns = (*COLUMNS, KL) if with_kl else COLUMNS
        self.row_bytes = sum(np.dtype(dtype).itemsize for _, dtype in self.columns)
        self.done: Bools = np.zeros(len(plan), dtype=np.bool_)
        self._at: Ints = np.zeros(len(plan), dtype=np.int64)  # where in the file each window's record begins
        self.seconds = 0.0
        self._file = RecordFile(path, header(identity))
        try:
            for window, at, body in self._file.replay():
                self._take(window, at, body)
        except BaseException:
            self._file.close()
            raise

    def _take(self, window: int, at: int, body: bytes) -> None:
        """Take in a record that was read back."""
        problem = self._problem(window, body)
        if problem is not None:
            raise RunError(f"{self.path} cannot be resumed: {problem}", fix="score again with --fresh")
        if body:
            self._know(window, at, body)
        else:
            self.done[window] = False

    def _problem(self, window: int, body: bytes) -> str | None:
        """What is impossible about a record whose checksum is right; None if nothing is."""
        if window >= len(self.plan):
            return f"it has window {window} of {len(self.plan)}"
        if not body:
            return None if self.done[window] else f"it takes back window {window}, which it does not have"
        if self.done[window]:
            return f"it has window {window} twice"
        targets = int(self.plan.target_counts[window])
        if len(body) != SECONDS.size + targets * self.row_bytes:
            return f"its record of window {window} has the wrong length"
        if not 0 <= SECONDS.unpack_from(body)[0] < math.inf:
            return f"window {window} took an impossible time"
        problem = impossible(self._split(body, targets), self.vocabulary)
        return None if problem is None else f"in window {window} {problem}"

    def _split(self, body: bytes, targets: int) -> dict[str, Column]:
        found, place = {}, SECONDS.size
        for name, dtype in self.columns:
            found[name] = np.frombuffer(body, dtype, targets, place)
            place += found[name].nbytes
        return found

    def _know(self, window: int, at: int, body: bytes) -> None:
        """The record at this place is this window's."""
        self.seconds += SECONDS.unpack_from(body)[0]
        self._at[window] = at
        self.done[window] = True
        if self.kl is not None:
            begin, end = self.plan.target_offsets[window : window + 2]
            self.kl[begin:end] = self._split(body, int(end - begin))["kl"]

    def add(self, window: int, answers: Answers, seconds: float) -> None:
        """Keep a window's scores."""
        kl = answers.kl if self.kl is not None else None
        given = [answers.logprob[:, 0], measured(answers.rank)[:, 0], answers.entropy, answers.top, answers.top_logprob]
        given += [] if kl is None else [kl]
        body = SECONDS.pack(seconds) + b"".join(
            np.ascontiguousarray(column, dtype=dtype).tobytes()
            for column, (_, dtype) in zip(given, self.columns, strict=True)
        )
        problem = self._problem(window, body)
        if problem is not None:
            raise EngineError(f"the engine gave no usable scores: {problem}", fix="this is a fault of the engine")
        self._know(window, self._file.append(window, body), body)

    def forget(self, window: int) -> None:
        """Score a window again that the journal has: what belongs to its scores elsewhere was lost."""
        assert self.done[window], "a window that was never scored"
        self._file.append(window, b"")
        self.done[window] = False

    def rows(self, begin: int, end: int) -> Scores:
        """The scores of some consecutive targets, those of whole windows; NaN if there is none yet."""
        offsets = self.plan.target_offsets
        found = Scores.empty(end - begin)
        for window in range(*np.searchsorted(offsets, (begin, end)).tolist()):
            if self.done[window]:
                self._read_into(found, int(offsets[window]) - begin, window)
        return found

    def _read_into(self, found: Scores, row: int, window: int) -> None:
        n = int(self.plan.target_counts[window])
        columns = self._split(self._file.body(int(self._at[window]), window), n)
        for name, _ in COLUMNS:
            getattr(found, name)[row : row + n] = columns[name]

    def close(self) -> None:
        self._file.close()


def impossible(columns: Mapping[str, Column], vocabulary: int | None = None) -> str | None:
    """What no model can have answered, in words; None if all is possible.

    Minus infinity is a probability of zero, and allowed; so is an infinite divergence.
    """
    highest = math.inf if vocabulary is None else vocabulary
    bounds = {
        "logprob": (-math.inf, ROUNDING),
        "rank": (1, highest),
        "entropy": (-ROUNDING, math.inf),
        "top": (0, highest - 1),
        "top_logprob": (-math.inf, ROUNDING),
        "kl": (0.0, math.inf),
    }
    for name, column in columns.items():
        least, most = bounds[name]
        bad = ~((column >= least) & (column <= most))  # NaN is not between any two numbers
        if name in ("entropy", "top_logprob"):
            bad |= np.isinf(column)
        if bad.any():
            return f"{name.replace('_', ' ')} is {column[bad][0]:g}"
    return None


def header(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a journal's first line says."""
    return {"format": FORMAT, "identity": identity}


def first_line(identity: Mapping[str, Any]) -> bytes:
    """The whole of a journal that has been begun and holds no score."""
    return json.dumps(header(identity), sort_keys=True, allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Found:
    """What a journal says of itself without its plan."""

    identity: dict[str, Any] | None  # of the run it belongs to; None if that cannot be read
    older: bool  # written in a format that is no longer read
    begun: bytes | None  # all there is of a file that holds no record
    ours: bool  # nothing but scoremode writes such a file


def look(path: Path) -> Found:
    """What lies there under a journal's name, damaged or not."""
    if not path.is_file():
        return Found(identity=None, older=False, begun=None, ours=False)
    with path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    known = read_header(path) or {}
    rest = start.partition(b"\n")[2]
    older = {"model", "plan", "engine"} <= known.keys() or (
        type(known.get("format")) is int and known["format"] != FORMAT
    )
    identity = None if older else known.get("identity")
    return Found(
        identity=identity if isinstance(identity, dict) else None,
        older=older,
        begun=start if not rest else None,
        ours=older
        or isinstance(identity, dict)
        or first_line({}).startswith(start[:20])
        or any(magic in start for magic in (MAGIC, OLD_MAGIC)),
    )


def read_identity(path: Path) -> dict[str, Any] | None:
    """What a journal says it is scoring; None if even that was not written whole."""
    return look(path).identity
