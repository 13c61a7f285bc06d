"""One declaration of a number: the value per row that it is the mean of, what it can be, and how it is shown.

    STATISTICS = (Statistic("k1", "mean of -ln r, nats", lambda tokens: -tokens.log_ratio), …)
    computed(STATISTICS, rows) ─▶ {"k1": 0.0021, "k1_stderr": 0.0004, "k1_low": …, "k1_high": …, …}

Rows are any object with the ``groups`` (n,) of its rows. Value, error and bounds are those of estimate.py. Numbers of a
comparison are declared in comparison.py, those of a study beside the study. JSON, rules of ``--fail-if`` and tables
read the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np

from scoremode.core.statistics.estimate import error_fields, finite_or_none, ratio, with_error_fields
from scoremode.errors import NotMeasuredError
from scoremode.values import Bools, Estimate, Floats, Range

Number = Estimate | float | None
"""A statistic's value; None: what it needs was not measured, or there is nothing to compute it from."""


@dataclass(frozen=True, slots=True)
class TerminalColumn:
    """A statistic as a column of the table in a terminal."""

    title: str
    leaves: int = 0  # in a narrow terminal, columns with the largest number are left out first; those with 0 stay


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number; with an error, it has four fields (value, ``…_stderr``, ``…_low``, ``…_high``).

    ``mean`` computes a value per row, whose mean over all rows is the statistic. If ``of`` is given, it computes the
    statistic from the whole instead: the object that the statistics are computed of, ``PairedMeans`` in a comparison.
    """

    name: str = ""  # in the class of a result, that of the attribute
    about: str = ""  # one line, shown where the label alone is not enough
    mean: Callable[[Any], Floats | Bools] | None = None
    of: Callable[[Any], Number] | None = None
    per: Callable[[Any], Floats] | None = None  # what each row counts in the mean; None: 1
    rows: str = ""  # attribute of the whole that has the rows; "": the whole itself
    range: Range = "any"  # of ``mean``: bounds stay in it
    has_error: bool = True
    by_document: bool = False  # of perplexities: a method may average those of documents, instead of ``mean``
    needs: str = ""  # a column, or what else was measured: the statistic is None where it was not
    ranks: Literal[-1, 0, 1] = 0  # candidates can be ranked by it: 1 if more is better, -1 if less; 0 if they cannot
    better: Literal["low", "high", "one", "none"] = "none"  # which values are shown as better; one: closer to 1
    percent: bool = False  # shown as a percentage
    label: str = ""  # heading in the tables of the report; "": it is not in them
    title: str = ""  # heading where a user asks for it by name; "": its label, or its name
    column: TerminalColumn | None = None
    card: str = ""  # heading in the table of a model card
    choice: str = ""  # on the switch of the chart against size; "": it is not drawn there
    axis: str = ""  # the label of that chart's axis

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", self.name or name)

    @overload
    def __get__(self, result: None, owner: type) -> Self: ...
    @overload
    def __get__(self, result: object, owner: type) -> Estimate: ...
    def __get__(self, result: Any, owner: type) -> Any:
        """In the class of a result, a statistic is an attribute; ``estimates`` of the result has its value."""
        if result is None:
            return self
        if (number := result.estimates[self.name]) is None:
            raise NotMeasuredError(f"{self.name} of {owner.__name__} was not measured, or is not known")
        return number

    @property
    def fields(self) -> tuple[str, ...]:
        return error_fields(self.name) if self.has_error else (self.name,)

    @property
    def factor(self) -> float:
        """The factor by which a value is multiplied when it is shown."""
        return 100.0 if self.percent else 1.0

    def cost(self, value: float) -> float:
        """The value as a cost: less is better."""
        if self.better == "one":
            return abs(math.log(value)) if value > 0 else math.inf
        return -value if self.better == "high" else value

    def estimate(self, whole: Any) -> Number:
        """The number of rows in memory: an ``Estimate`` if it has an error."""
        rows = getattr(whole, self.rows) if self.rows else whole
        if self.needs and getattr(rows, self.needs) is None:
            return None
        if self.of is not None:
            return self.of(rows)
        assert self.mean is not None, "a statistic is the mean of something, or computed from the whole"
        values = self.mean(rows)
        return ratio(values, np.ones(len(values)) if self.per is None else self.per(rows), rows.groups, self.range)

    def as_fields(self, number: Number) -> dict[str, float | None]:
        """Its fields for JSON; None for a value that does not exist, is infinite or is undefined."""
        if self.has_error or isinstance(number, Estimate):
            assert number is None or isinstance(number, Estimate), f"{self.name} has no error"
            return with_error_fields(self.name, number)
        return {self.name: number if isinstance(number, int) else finite_or_none(number)}


@dataclass(frozen=True, slots=True)
class PlainStatistic(Statistic):
    """A number without an error."""

    has_error: bool = False

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __get__(self, result: None, owner: type) -> Self: ...
        @overload
        def __get__(self, result: object, owner: type) -> float: ...
        def __get__(self, result: Any, owner: type) -> Any: ...


def plain(name: str, about: str, of: Callable[[Any], Any], **more: Any) -> PlainStatistic:
    """A number without an error."""
    return PlainStatistic(name, about, of=of, **more)


def fields_of(statistics: Iterable[Statistic]) -> tuple[str, ...]:
    """The fields of several statistics, in their order: what a rule may name."""
    return tuple(field for statistic in statistics for field in statistic.fields)


def estimates(statistics: Iterable[Statistic], whole: Any) -> dict[str, Number]:
    """The numbers of rows in memory, by name."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # infinities become None in JSON
        return {statistic.name: statistic.estimate(whole) for statistic in statistics}


def fields_from(statistics: Iterable[Statistic], numbers: Mapping[str, Number]) -> dict[str, float | None]:
    """Numbers by name as fields, flat and ready for JSON."""
    return {name: value for s in statistics for name, value in s.as_fields(numbers[s.name]).items()}


def computed(statistics: Iterable[Statistic], whole: Any) -> dict[str, float | None]:
    """The numbers of rows in memory as such fields."""
    statistics = tuple(statistics)
    return fields_from(statistics, estimates(statistics, whole))
