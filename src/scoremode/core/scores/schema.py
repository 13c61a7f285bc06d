"""Declares every column of a run once, for journal, Parquet, replicas, service, tables, JSON and docs.

To add a column, add a field to ``ScoreColumns``, or to ``DivergenceColumns`` if it compares a model with a baseline,
compute it (in head/, or in an engine), and test it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from scoremode.errors import listed
from scoremode.values import Bools, Floats, Ids, Ints, Range

ROUNDING = 1e-4
"""Nats by which a log-probability may exceed 0. The target's logit and the largest logit may come from two float32
products that round differently. scoremode's heads give at most 0 on a CPU; their self-test allows an error of 1e-4."""
SLACK = 1e-2
"""Nats by which columns may contradict each other, and an entropy its bound: servers may round as they like."""
LEAST_FINITE = -1e39
"""The logarithm of a probability other than zero is larger: it is a difference of two float32 numbers."""
MOST_IDS = 1 << 31  # ids are int32

NUMPY_TYPES: dict[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "int64": np.dtype("<i8"), "int32": np.dtype("<i4")}

Array = npt.NDArray[Any]


class Metric(msgspec.Struct, frozen=True):
    """A number of a run that is the mean of one column."""

    name: str
    label: str  # its name in a terminal
    title: str = ""  # its heading on the page and in notebooks; "": its label
    share_of: int | None = None  # the share of rows with this value, instead of the mean of the values

    def range(self, column: ColumnSpec) -> Range:
        """Returns what the metric can be, by the declared bounds of its column."""
        if self.share_of is not None or (column.least, column.most) == (0.0, 1.0):
            return "share"
        return "positive" if column.least is not None and column.least >= 0 else "any"

    def values(self, column: Array) -> Array:
        """Returns the values that are averaged."""
        return column if self.share_of is None else column == self.share_of


class ColumnSpec(msgspec.Struct, frozen=True):
    """One column: its type and shape, its meaning, and its possible values."""

    dtype: Literal["float64", "int64", "int32", "text"]
    meaning: str  # shown in the documentation
    per: Literal["target", "row"] = "row"  # an engine gives (rows, targets per row) values, or one value per row
    unit: str = ""
    least: float | None = None  # None: no bound
    most: float | Literal["ids", "last id", "log ids"] | None = None  # a word: it depends on the vocabulary's size
    finite: bool = False  # no infinity, even if the bounds would allow it
    together: str = ""  # columns with the same word are measured together or not at all
    optional: bool = True  # may the column be missing? False if its field has no default
    always: bool = True  # False: the file of a run that does not have it lacks it, instead of nulls
    metrics: tuple[Metric, ...] = ()
    name: str = ""  # name of the annotated field

    @property
    def numpy_type(self) -> np.dtype[Any]:
        """The type in arrays and in files."""
        return NUMPY_TYPES[self.dtype]

    def impossible_value(self, column: Array, ids: int, least: float | None = None) -> str | None:
        """Returns the first value that no model with so many ids can give, in words, or None if all are possible."""
        if not len(column):
            return None
        least = self.least if least is None else least
        least = -math.inf if least is None else least
        most = math.inf if self.most is None else self.most
        if isinstance(most, str):
            most = {"ids": ids, "last id": ids - 1, "log ids": math.log(ids) + SLACK}[most]
        low, high = np.minimum.reduce(column), np.maximum.reduce(column)  # NaN if any value is NaN
        is_finite = not self.finite or (low > -math.inf and high < math.inf)
        if low >= least and high <= most and is_finite:
            return None
        bad = ~((column >= least) & (column <= most))  # in this form, NaN is bad too
        if not is_finite:
            bad |= np.isinf(column)
        return f"{self.name.replace('_', ' ')} is {column[bad][0]:g}"


@dataclass(frozen=True, eq=False)
class ScoreColumns:
    """The measurements of an engine for each target. None: not measured."""

    __slots__ = ()

    logprob: Annotated[
        Floats,
        ColumnSpec(
            "float64",
            "natural logarithm of the target's probability, in nats, at most 0",
            per="target",
            unit="nats",
            most=ROUNDING,
        ),
    ]
    rank: Annotated[
        Ints | None,
        ColumnSpec(
            "int64",
            "1 if the target is the model's first choice",
            per="target",
            least=1,
            most="ids",
            metrics=(
                Metric("mean_rank", "mean rank", "Mean rank"),
                Metric("top1_accuracy", "top-1 accuracy", "Top-1", share_of=1),
            ),
        ),
    ] = None
    entropy: Annotated[
        Floats | None,
        ColumnSpec(
            "float64",
            "entropy of the whole distribution, in nats",
            unit="nats",
            least=-ROUNDING,
            most="log ids",  # reached if all ids are equally likely
            finite=True,
            metrics=(Metric("mean_entropy", "entropy (nats)", "Entropy, nats"),),
        ),
    ] = None
    top: Annotated[
        Ids | None,
        ColumnSpec("int32", "id of the model's first choice", least=0, most="last id", together="first choice"),
    ] = None
    top_logprob: Annotated[
        Floats | None,
        ColumnSpec(
            "float64",
            "logprob of the model's first choice",
            unit="nats",
            most=ROUNDING,
            finite=True,
            together="first choice",
        ),
    ] = None


@dataclass(frozen=True, eq=False)
class FactColumns:
    """Each target's position in the text, and its token's text. A person needs them to read the scores."""

    __slots__ = ()

    window: Annotated[Ints, ColumnSpec("int64", "the window that the target is scored in")]
    document: Annotated[Ints, ColumnSpec("int64", "the document that it stands in")]
    token: Annotated[Ints, ColumnSpec("int64", "its index in the stream of all tokens")]
    id: Annotated[Ids, ColumnSpec("int32", "the id of its token")]
    byte_len: Annotated[Ids, ColumnSpec("int32", "number of bytes that it owns")]
    word_starts: Annotated[Ids, ColumnSpec("int32", "number of words that begin in it")]
    group: Annotated[Ints, ColumnSpec("int64", "targets of one group are not independent of each other")]
    weight: Annotated[Floats, ColumnSpec("float64", "how much it counts in the method's mean")]
    text: Annotated[npt.NDArray[np.object_], ColumnSpec("text", "the text of its token; equal ids have equal texts")]
    top_text: Annotated[
        npt.NDArray[np.object_] | None, ColumnSpec("text", "the text of `top`", together="first choice")
    ] = None
    slice: Annotated[
        npt.NDArray[np.object_] | None,
        ColumnSpec(
            "text", "the part of the text that it begins in, if the text has [slices](corpora.md#slices)", always=False
        ),
    ] = None


@dataclass(frozen=True, eq=False)
class DivergenceColumns:
    """How far the model's distribution is from a baseline's, for each row. None: not measured.

    A run that was compared with a baseline has ``kl``, and the others as far as its engine and its baseline give them.
    """

    __slots__ = ()

    kl: Annotated[
        Floats | None,
        ColumnSpec(
            "float64", "KL(baseline‖this model), if the run was compared with a baseline", unit="nats", least=0.0
        ),
    ] = None
    kl_reverse: Annotated[
        Floats | None, ColumnSpec("float64", "KL(this model‖baseline), measured with `kl`", unit="nats", least=0.0)
    ] = None
    total_variation: Annotated[
        Floats | None,
        ColumnSpec(
            "float64",
            "half of Σ abs(p - q) over all ids, measured with `kl`; 1 - it is Σ min(p, q)",
            least=0.0,
            most=1.0,
        ),
    ] = None
    same_first: Annotated[
        Ids | None,
        ColumnSpec(
            "int32",
            "leading choices that are the baseline's, in order, up to 5; measured with `kl`; 5 if all of fewer ids are",
            least=0,
            most=5,
        ),
    ] = None


def _declared(owner: type) -> tuple[ColumnSpec, ...]:
    """Returns the columns that a class declares, in the order of its fields."""
    hints, columns = get_type_hints(owner, include_extras=True), []
    for field in fields(owner):
        for note in getattr(hints[field.name], "__metadata__", ()):
            columns.append(msgspec.structs.replace(note, name=field.name, optional=field.default is not MISSING))
    return tuple(columns)


FACTS = _declared(FactColumns)
DIVERGENCE = _declared(DivergenceColumns)
KL = DIVERGENCE[0]


@dataclass(frozen=True)
class Schema:
    """The columns of scores, in their order."""

    scores: tuple[ColumnSpec, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.scores)

    @cached_property
    def metrics(self) -> tuple[tuple[ColumnSpec, Metric], ...]:
        """The metrics that are means over a column, with their columns."""
        return tuple((column, metric) for column in self.scores for metric in column.metrics)

    def chosen(self, names: Container[str]) -> tuple[ColumnSpec, ...]:
        """Returns the columns with these names, in the order of the schema."""
        return tuple(column for column in self.scores if column.name in names)

    def set_problem(self, names: Sequence[str]) -> str | None:
        """Returns the problem of a set of columns, in words, or None if the set is valid."""
        if names == self.names:
            return None
        for name in names:
            if name not in self.names:
                return f"{name} was not declared"
        for column in self.scores:
            if column.name not in names and not column.optional:
                return f"{column.name} is missing"
        for word in {column.together for column in self.scores if column.together}:
            joint = [column.name for column in self.scores if column.together == word]
            if 0 < sum(name in names for name in joint) < len(joint):
                return f"{listed(joint)} come together or not at all"
        return None

    def impossible_value(
        self, columns: Mapping[str, Array], vocabulary: int | None = None, least_kl: float = 0.0
    ) -> str | None:
        """Returns the first value that no model can give, in words, or None if all values are possible.

        Minus infinity is allowed as the logarithm of probability zero. An infinite divergence is allowed, too.
        """
        ids = vocabulary or MOST_IDS
        for column in (*self.scores, *DIVERGENCE):
            least = least_kl if column is KL else None
            if column.name in columns and (wrong := column.impossible_value(columns[column.name], ids, least)):
                return wrong
        return None


def chosen_divergences(names: Container[str]) -> tuple[ColumnSpec, ...]:
    """Returns the columns of a divergence with these names, in the order of the schema."""
    return tuple(column for column in DIVERGENCE if column.name in names)


def contradiction(columns: Mapping[str, Array]) -> str | None:
    """Returns the first values of one target that contradict each other, in words, or None."""
    for bad, template in _contradictions(columns):
        if bad.any():
            return template.format(**{name: column[np.argmax(bad)] for name, column in columns.items()})
    return None


def _contradictions(columns: Mapping[str, Array]) -> Iterator[tuple[Bools, str]]:
    """No token is likelier than the first choice, which alone has rank 1. So the entropy, a mean of -log p, is at least
    -log p of that choice.
    """
    logprob, top = columns["logprob"], columns.get("top_logprob")
    yield (logprob > -np.inf) & (logprob < LEAST_FINITE), "logprob is {logprob:g}"
    if top is None:
        return
    yield logprob - top > SLACK, "top logprob is {top_logprob:g}, below the logprob {logprob:g} of a token"
    if (rank := columns.get("rank")) is not None:
        yield (rank == 1) & (top - logprob > SLACK), "logprob is {logprob:g} at rank 1, and top logprob {top_logprob:g}"
    if (entropy := columns.get("entropy")) is not None:
        yield entropy + top < -SLACK, "entropy is {entropy:g}, and top logprob {top_logprob:g}"


def wrong_first_choice(targets: Ids, rank: Ints | None, top: Ids | None) -> str | None:
    """Returns the first target (m, k) that has rank 1 and is not the first choice, or is it and has another rank."""
    if rank is None or top is None or not (bad := (rank == 1) != (targets == top[:, None])).any():
        return None
    row, _ = at = tuple(np.argwhere(bad)[0])
    return f"token {targets[at]} has rank {rank[at]}, and the first choice is {top[row]}"


BUILT_IN = Schema(_declared(ScoreColumns))
"""The columns that every engine may give."""
