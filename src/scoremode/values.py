"""Arrays and numbers that every room shares: NumPy only, frozen, with shapes in comments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Raw = npt.NDArray[Any]
"""Numbers bit for bit: float16 and float32 as NumPy has them, bfloat16 as uint16 bit patterns."""

Range = Literal["any", "change", "positive", "share"]
"""What a mean can be: any number, none below 0, or only numbers from 0 to 1. Its bounds stay in that range."""

NUMERICS = 3
"""The version of scoremode's own numerics. It is part of every run's identity: a stored run is reused only if this
number is the same.

Increase it with every change after which the same model, text, settings and library versions may give a different
score: a kernel that adds in a different order, a new default of an engine, a plan with different windows under the same
name. Increase it as well if the groups or the bounds that a run stores change. The package's version is not part of the
identity, because most releases change no score and some changes happen between releases.
"""


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Makes an array read-only and returns it: values here are shared between threads, engines and caches."""
    array.setflags(write=False)
    return array


def change(values: Floats, before: Floats) -> Floats:
    """Returns how far each number moved; a number that was and is the same infinity has not moved."""
    with np.errstate(invalid="ignore"):
        changes: Floats = np.where(values == before, 0.0, values - before)
    return changes


# ── numbers for people ───────────────────────────────────────────────────────────────────────────────────────────────
DUST = 1e-9  # relative to the value: a smaller error is rounding noise
TINY = 1e-290  # smaller numbers are 0, because powers of ten next to them are not exact
SMALL = 1e-4  # smaller numbers have an exponent


def usable(value: Any) -> float | None:
    """The value as a float, which may be infinite; None if it is missing, NaN or not a number."""
    if value is None or isinstance(value, str | bool):
        return None
    number = float(value)
    return None if math.isnan(number) else number


def digits_of(error: float) -> int:
    """How many decimals an error justifies: as many as show two digits of the error."""
    return max(0, 1 - math.floor(math.log10(error)))


def rounded(value: Any, stderr: Any = None, *, percent: bool = False, supports: Any = None) -> tuple[str, str]:
    """Writes a number for people, and its error, which is '' if it has none. Every table follows this one rule.

    A number has the decimals that show two digits of its error. ``supports`` is an error that decides the decimals and
    is not written: perplexities of one table are compared, so the paired error of their difference decides. Without an
    error, a number has four digits, or three if it is below 1. Numbers below 0.0001 have an exponent, and so have those
    without an error from a million on.

    >>> rounded(12.7412, 0.3149), rounded(18.0401, supports=0.018), rounded(291.8165)
    (('12.74', '± 0.31'), ('18.040', ''), ('291.8', ''))
    >>> rounded(3.83e-5, 2.4e-6), rounded(0.98149, 0.00203, percent=True), rounded(None)
    (('3.83e-5', '± 0.24e-5'), ('98.15%', '± 0.20%'), ('–', ''))
    """
    number, error = usable(value), usable(stderr if supports is None else supports)
    if number is None:
        return "–", ""
    factor, unit = (100.0, "%") if percent else (1.0, "")
    number, error = _above_dust(number) * factor, None if error is None else _above_dust(error) * factor
    if math.isinf(number):
        return ("∞" if number > 0 else "-∞"), ""
    if error is None or math.isinf(error) or error <= DUST * abs(number):
        has_error = error is not None and not math.isinf(error) and supports is None
        has_error = has_error and not (percent and number in (0, 100))  # a share that is the same everywhere has bounds
        return f"{_few_digits(number)}{unit}", f"± 0{unit}" if has_error else ""
    # numbers of a column are compared: a small number and its error share a power of ten
    power = math.floor(math.log10(abs(number))) if 0 < abs(number) < SMALL and error < 1 else 0
    number, error, tail = number / 10.0**power, error / 10.0**power, f"e{power}{unit}" if power else unit
    digits = digits_of(error)
    return f"{number:,.{digits}f}{tail}", "" if supports is not None else f"± {error:,.{digits}f}{tail}"


def _above_dust(number: float) -> float:
    return 0.0 if abs(number) < TINY else number


def _few_digits(number: float) -> str:
    """Rounds a number that has no standard error."""
    size = abs(number)
    if size == 0:
        return "0"
    if SMALL <= size < 1e6:
        return f"{number:,.{max(0, (3 if size >= 1 else 2) - math.floor(math.log10(size)))}f}"
    mantissa, power = f"{number:.2e}".split("e")
    return f"{mantissa}e{int(power)}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its uncertainty.

    ``stderr`` is one standard error, None if there are too few groups to know it. ``n`` counts targets, ``groups``
    the independent pieces of text that the error was computed from. ``low`` and ``high`` are the 95 % bounds, by
    Student's t with ``freedom`` degrees of freedom, on a scale that keeps them in the number's range.

    It is printed by the rule of all tables, and formats, compares and converts as its value does. Two estimates are
    equal only if all of their fields are.

    >>> perplexity = Estimate(12.5, 0.25, 1000, 40)
    >>> perplexity
    12.50 ± 0.25
    >>> f"{perplexity:.2f}", perplexity < 20, float(perplexity)
    ('12.50', True, 12.5)
    """

    value: float
    stderr: float | None
    n: int
    groups: int
    freedom: float | None = None
    low: float | None = None
    high: float | None = None

    def __repr__(self) -> str:
        value, error = rounded(self.value, self.stderr)
        return f"{value} {error or '± ?'}"

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        """Formats the value, as ``f"{run.perplexity:.2f}"`` does; without a specification, the error is shown too."""
        return format(self.value, spec) if spec else repr(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Estimate):
            return astuple(self) == astuple(other)
        return self.value == other if isinstance(other, Real) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.value)  # equal numbers must have equal hashes

    def __lt__(self, other: Estimate | float) -> bool:
        return self.value < _number(other) if isinstance(other, Estimate | Real) else NotImplemented

    def __le__(self, other: Estimate | float) -> bool:
        return self.value <= _number(other) if isinstance(other, Estimate | Real) else NotImplemented

    def __gt__(self, other: Estimate | float) -> bool:
        return self.value > _number(other) if isinstance(other, Estimate | Real) else NotImplemented

    def __ge__(self, other: Estimate | float) -> bool:
        return self.value >= _number(other) if isinstance(other, Estimate | Real) else NotImplemented

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Estimate:
        """Makes an Estimate from a manifest's JSON, where a value of None means infinity."""
        value = math.inf if stored["value"] is None else stored["value"]
        names = ("stderr", "n", "groups", "freedom", "low", "high")
        return Estimate(value, *(stored[name] for name in names))


def _number(number: Estimate | float) -> float:
    return number.value if isinstance(number, Estimate) else number
