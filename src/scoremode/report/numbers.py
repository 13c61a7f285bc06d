"""Numbers for people, with the digits that their errors justify."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.statistics.comparison import STATISTICS
from scoremode.statistics.groups import FEWEST
from scoremode.values import Estimate

Statistics = Mapping[str, Any]

DUST = 1e-9  # relative to the value: a smaller error is rounding noise


@dataclass(frozen=True)
class RunMeasure:
    """A metric of a run, as a column or a line of tables."""

    name: str  # in the manifest
    label: str  # on the page and in notebooks
    terminal: str  # the label in a terminal
    percent: bool = False


SHOWN = sorted((s for s in STATISTICS if s.label), key=lambda s: s.name == "bits_per_byte_candidate")
"""The statistics of a comparison that tables show, in their order: as JSON lists them, but bits per byte come last."""

RUN_MEASURES = (
    RunMeasure("perplexity", "Perplexity", "perplexity"),
    RunMeasure("bits_per_byte", "Bits/byte", "bits per byte"),
    RunMeasure("word_perplexity", "Word PPL", "word perplexity"),
    RunMeasure("top1_accuracy", "Top-1", "top-1 accuracy", percent=True),
    RunMeasure("mean_rank", "Mean rank", "mean rank"),
    RunMeasure("mean_entropy", "Entropy, nats", "entropy (nats)"),
)


def usable(value: Any) -> float | None:
    """The value as a float, which may be infinite; None if it is missing, NaN or not a number."""
    if value is None or isinstance(value, str | bool):
        return None
    number = float(value)
    return None if math.isnan(number) else number


def digits_of(error: float) -> int:
    """How many decimals an error justifies: as many as show two digits of the error."""
    return min(8, max(0, 1 - math.floor(math.log10(error))))


def written(value: Any, stderr: Any = None, *, percent: bool = False) -> tuple[str, str]:
    """For the page: a number to the digits that its error justifies, and the error, which is '' if there is none.

    >>> written(12.7412, 0.3149)
    ('12.74', '± 0.31')
    >>> written(None)
    ('–', '')
    """
    number, error = usable(value), usable(stderr)
    if number is None:
        return "–", ""
    if math.isinf(number):
        return ("∞" if number > 0 else "−∞"), ""
    factor, unit = (100.0, "%") if percent else (1.0, "")
    number *= factor
    if error is None or math.isinf(error):
        return f"{_rounded(number, percent)}{unit}", ""
    error *= factor
    if error <= DUST * abs(number):
        return f"{_rounded(number, percent)}{unit}", f"± 0{unit}"
    # numbers in a column are compared: below a thousandth, a number and its error share a power of ten
    power = math.floor(math.log10(abs(number))) if 0 < abs(number) < 1e-3 else 0
    number, error, shown = number / 10.0**power, error / 10.0**power, f"e{power}" if power else ""
    digits = digits_of(error)
    tail = f"{shown}{unit}".replace("-", "−")
    return f"{number:,.{digits}f}{tail}".replace("-", "−"), f"± {error:,.{digits}f}{tail}"


def _rounded(number: float, percent: bool) -> str:
    """Rounds a number that has no standard error to three or four digits."""
    size = abs(number)
    if size == 0:
        text = "0"
    elif percent and size >= 0.01:
        text = f"{number:,.2f}"
    elif 1e-3 <= size < 1e6:
        text = f"{number:,.{max(0, 3 - math.floor(math.log10(size)))}f}" if size >= 1 else f"{number:#.3g}"
    else:
        mantissa, power = f"{number:.2e}".split("e")
        text = f"{mantissa}e{int(power)}"
    return text.replace("-", "−")


def with_error(estimate: Estimate, percent: bool = False) -> str:
    """For a terminal and Markdown: the value to the digits that its error justifies, and the error.

    >>> with_error(Estimate(12.7412, 0.3149, 100, 10))
    '12.74 ± 0.31'
    """
    factor, unit = (100.0, "%") if percent else (1.0, "")
    value = estimate.value * factor
    if math.isnan(value):
        return "none (no whole word or byte was scored)"
    if math.isinf(value):
        return "unbounded (a target has probability zero)"
    if estimate.stderr is None:
        return f"{value:,.4f}{unit}"
    error = estimate.stderr * factor
    if error <= DUST * abs(value):
        return f"{value:,.4f}{unit} ± 0"
    digits = digits_of(error)
    return f"{value:,.{digits}f}{unit} ± {error:,.{digits}f}{unit}"


def basis(estimate: Estimate, kind: str, percent: bool = False) -> str:
    """The groups that an error is based on, and the bounds that follow from the error.

    >>> basis(Estimate(12.7412, 0.3149, 100, 10, 9.0, 12.0288, 13.4536), "documents")
    '10 documents, 95%: 12.03 to 13.45'
    >>> basis(Estimate(12.7412, None, 100, 3), "documents")
    'too few groups for an error: 3 documents, 5 are needed'
    """
    counted = f"{estimate.groups:,} {kind}"
    if not math.isfinite(estimate.value):
        return ""
    if estimate.stderr is None or estimate.low is None or estimate.high is None:
        return f"too few groups for an error: {counted}, {FEWEST} are needed"
    factor, unit = (100.0, "%") if percent else (1.0, "")
    some = estimate.stderr > DUST * abs(estimate.value)
    digits = digits_of(estimate.stderr * factor) if some else 4
    low, high = (f"{bound * factor:,.{digits}f}{unit}" for bound in (estimate.low, estimate.high))
    return f"{counted}, 95%: {low} to {high}"


def file_size(count: Any) -> str:
    number = usable(count)
    if number is None or not math.isfinite(number):
        return "–"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"
