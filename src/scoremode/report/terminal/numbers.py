"""Numbers with their errors, rounded to the digits that the errors justify."""

from __future__ import annotations

import math

from scoremode.statistics.groups import FEWEST
from scoremode.values import Estimate

DUST = 1e-9  # relative to the value: a smaller error is rounding noise


def with_error(estimate: Estimate, percent: bool = False) -> str:
    """``12.74 ± 0.31``: the value to the digits that its error justifies.

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


def digits_of(error: float) -> int:
    return min(8, max(0, 1 - math.floor(math.log10(error))))


def basis(estimate: Estimate, kind: str, percent: bool = False) -> str:
    """What an error is based on: its groups, and the bounds that follow.

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
