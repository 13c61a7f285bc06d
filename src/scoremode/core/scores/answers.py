"""The input and output of an engine: windows in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE, Array, DivergenceColumns, ScoreColumns, contradiction
from scoremode.errors import EngineError
from scoremode.values import Ids, Ints, Raw

FAULT = "this is a fault of the engine: report it to its author"


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The tokens fed in one forward pass, and the rows and targets to score.

    Row r sees ``ids[:r + 1]`` and predicts the next token; position 0 is never a target because no row precedes it.
    """

    ids: Ids  # (t,) tokens that are fed
    rows: Ids  # (m,) ascending, each < t
    targets: Ids  # (m, k) token ids to score at each row


def own_tokens(ids: Ids) -> Window:
    """Returns a window that scores every token except the first, each from the row before it."""
    return Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None])


class WindowSource(Protocol):
    """Anything that engines can score: a Plan, or a WindowList."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Ints: ...  # (windows,) tokens fed by each

    @property
    def prefix_group(self) -> Ints | None: ...  # (windows,) windows with equal numbers begin with the same prompt

    @property
    def vocabulary(self) -> int | None: ...  # ids from here on get no probability; None: all ids of the head

    def window(self, index: int) -> Window: ...


def prescribed_batches(source: WindowSource) -> list[Ints] | None:
    """Returns the batches of a source that was cut out of a larger one; None if engines choose batches themselves."""
    batches: list[Ints] | None = getattr(source, "batches", None)
    return batches


@dataclass(frozen=True, slots=True)
class WindowList:
    """Windows that are given explicitly, not made by a method."""

    items: tuple[Window, ...]
    prefix_group: Ints | None = None
    vocabulary: int | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> Ints:
        return np.array([len(w.ids) for w in self.items], dtype=np.int64)

    def window(self, index: int) -> Window:
        return self.items[index]


@dataclass(frozen=True, slots=True, eq=False)
class Answers(DivergenceColumns, ScoreColumns):
    """An engine's answer to one window: one line per requested row, one column per target of that row.

    Only ``logprob`` is required. A column that is None was not measured: it is shown so everywhere, never filled in.
    ``top`` and ``top_logprob`` are given together or not at all. All answers of one engine have the same columns.
    The columns of a divergence have one number per row, and are given only if a baseline was.
    """

    states: Raw | None = None  # (m, d) final hidden states, bit for bit; only if they were requested
    records: Raw | None = None  # (m, words) uint16, the whole distributions in 16 bits; only if they were requested

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that were measured, in the order of the schema.

        >>> Answers(np.zeros((1, 1)), entropy=np.zeros(1)).columns
        ('logprob', 'entropy')
        """
        return tuple([name for name in BUILT_IN.names if getattr(self, name) is not None])

    @property
    def divergences(self) -> tuple[str, ...]:
        """The names of the columns of a divergence that were measured, in the order of the schema."""
        return tuple(column.name for column in DIVERGENCE if getattr(self, column.name) is not None)

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yields every array that was given, by name: the columns, and the arrays that were requested in addition."""
        for name in (*self.columns, *REQUESTED):
            if (column := getattr(self, name)) is not None:
                yield name, column

    def apart(self, divergence: Mapping[str, Any]) -> Answers:
        """Returns these answers with the columns of a divergence, by name."""
        return replace(self, **divergence)


REQUESTED = ("states", *(column.name for column in DIVERGENCE), "records")
"""Arrays that answers have only if they were requested, with one line per row."""

T = TypeVar("T")


def measured(column: T | None) -> T:
    """Returns the column itself, for code that knows it was measured (not None)."""
    assert column is not None, "a column that was not measured"
    return column


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_answers(
    source: WindowSource, pairs: Sequence[tuple[int, Answers]], vocabulary: int | None = None, least_kl: float = 0.0
) -> None:
    """Requires numbers that a model can give, in the right shape, for each target of each window.

    Minus infinity is a probability of zero. ``vocabulary`` is the number of the model's ids, if it is known. The caller
    checks that all answers have the same columns.
    """
    for index, answers in pairs:
        check_shapes(targets_shape(source, index), index, answers)
    if pairs and _impossible([answers for _, answers in pairs], vocabulary, least_kl) is not None:
        for index, answers in pairs:
            if (wrong := _impossible([answers], vocabulary, least_kl)) is not None:
                raise _unusable(source, index, answers, wrong)


def check_shapes(shape: tuple[int, ...], index: int, answers: Answers) -> None:
    """Requires columns that the schema allows, each in the shape that follows from the shape of a window's targets."""
    wrong = BUILT_IN.set_problem(answers.columns)
    if wrong is not None:
        raise EngineError(f"window {index} got wrong columns: {wrong}", fix=FAULT)
    for column in (*BUILT_IN.scores, *DIVERGENCE):
        values = getattr(answers, column.name)
        wanted = shape if column.per == "target" else shape[:1]
        if values is not None and values.shape != wanted:
            noun = "scores" if column.name == "logprob" else f"values of {column.name}"
            raise EngineError(f"window {index} asked for {wanted} {noun} and got {values.shape}", fix=FAULT)


def _impossible(all_answers: Sequence[Answers], vocabulary: int | None, least_kl: float) -> str | None:
    """Returns the first value that no model can give, in words. The columns of all windows are checked together."""
    columns: dict[str, Array] = {}
    for name in (*all_answers[0].columns, *all_answers[0].divergences):
        columns[name] = np.concatenate([getattr(answers, name) for answers in all_answers], axis=None)
    wrong = BUILT_IN.impossible_value(columns, vocabulary, least_kl)
    if wrong is None and all(answers.logprob.shape[1] == 1 for answers in all_answers):
        return contradiction(columns)
    return wrong


def _unusable(source: WindowSource, index: int, answers: Answers, wrong: str) -> EngineError:
    for name in answers.columns:
        bad = np.argwhere(np.isnan(getattr(answers, name)) | (getattr(answers, name) == np.inf))
        if len(bad):
            return EngineError(
                f"the model gives NaN in window {index} at token {int(source.window(index).rows[bad[0][0]]) + 1}",
                fix="try --dtype float32; if it stays, the weights are damaged",
            )
    return EngineError(f"the engine gave no usable scores: in window {index} {wrong}", fix=FAULT)


def targets_shape(source: WindowSource, index: int) -> tuple[int, ...]:
    """Returns how many rows a window has, and how many targets per row. A plan knows both without making the window."""
    counts: Ints | None = getattr(source, "target_counts", None)
    return source.window(index).targets.shape if counts is None else (int(counts[index]), 1)
