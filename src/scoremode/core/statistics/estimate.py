"""Columns ─▶ numbers with errors. The errors are computed over independent groups (groups.py).

Group g has the sum s_g over n_g units and the share h_g = n_g / Σn. Then mean = Σs/Σn and

    variance = Σ (s_g - mean·n_g)² / (1 - h_g) / (Σn)²        equal groups: the usual G/(G-1)
    degrees of freedom = (Σ h_g²)² / Σ h_g⁴, at most G - 1     equal groups: G - 1

Bounds are Student's t with these degrees of freedom, on a scale that keeps them in the number's range:

    any number    mean                  mean ∓ t · stderr
    change        the same, and further on the side of a long tail
    positive      ln mean               mean · exp(∓ t · stderr / mean), and further above if the long tail lies there
    share         ln(mean / (1-mean))   the odds times exp(∓ t · stderr / (mean · (1 - mean)))

A sample often lacks the few groups with the largest values, and then both its mean and its spread are too small. So
on the side of a long tail, the bound is no nearer than Hall's transformation puts it (``reach``). Hall's skewness is
that of the mean, k = Σ r³ / (Σ r²)^1.5 with r = s_g - mean·n_g; samples show less of it than there is, so it counts
TAIL times, and again G / effective times: unequal groups show even less.

A share whose groups are each all yes or all no has the bounds of Clopper and Pearson: each group counts as one yes or
no. The formulas above account for a few large documents that dominate many small ones. With fewer than FEWEST groups,
the error is None. docs/statistics.md shows how often the bounds contain the true mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np

from scoremode.core.statistics.groups import FEWEST
from scoremode.values import Bools, Estimate, Floats, Ids, Ints, Range

LEVEL = 0.95  # confidence level of the bounds
TAIL = 2.5  # docs/statistics.md: with 2, claims of "no worse" are false more often than promised; 3 costs width
NO_TAIL = 1e-6  # a smaller skewness changes nothing, and would cancel digits
FLAT = 4.5  # Hall's transformation has its largest reach where skewness · reach is this; beyond, it would shrink again

GRAIN, COARSE = 2.0**-20, 2.0**30
ROUNDING = 64 * float(np.finfo(np.float64).eps)  # rounding error of a residual, relative to its two terms


class _ExactSums:
    """One sum per group. Multiples of GRAIN are added exactly, and the small remainders are added separately."""

    def __init__(self, coarse: Floats) -> None:
        self.coarse, self.fine = coarse, np.zeros(len(coarse))

    def add(self, groups: Ints, terms: Floats) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            is_small = np.abs(terms) < COARSE
            coarse = np.where(is_small, np.rint(terms / GRAIN) * GRAIN, terms)
            fine = np.where(is_small, terms - coarse, 0.0)
        np.add.at(self.coarse, groups, coarse)
        np.add.at(self.fine, groups, fine)

    def total(self) -> Fraction | float:
        """Returns the sum over all groups; it is exact if it is finite."""
        coarse, fine = float(self.coarse.sum()), float(self.fine.sum())
        return Fraction(coarse) + Fraction(fine) if math.isfinite(coarse + fine) else coarse + fine


class GroupSums:
    """Σ numerator and Σ denominator of each group.

    Millions of equal terms cause no rounding error that would look like a spread.

    >>> sums = GroupSums(5)
    >>> sums.add(np.arange(5), np.array([1.0, 2.0, 3.0, 4.0, 10.0]), np.ones(5))
    >>> sums.estimate()
    4.0 ± 1.6
    """

    def __init__(self, groups: int, shares: GroupSums | None = None) -> None:
        """``shares``: sums whose denominator is used here as well. The denominator is added there, not here."""
        self._numerator = _ExactSums(np.zeros(groups))
        self._denominator: _ExactSums = _ExactSums(np.zeros(groups)) if shares is None else shares._denominator
        self.n = 0

    @property
    def indices(self) -> Ints:
        """The numbers of the groups, from 0."""
        return np.arange(len(self._numerator.coarse))

    @property
    def numerator(self) -> Floats:
        return self._numerator.coarse + self._numerator.fine

    @property
    def denominator(self) -> Floats:
        return self._denominator.coarse + self._denominator.fine

    def some(self, groups: Ints) -> GroupSums:
        """Returns the sums of some groups, for terms whose denominator is 1."""
        sums = GroupSums(0)
        sums._numerator = _ExactSums(self.numerator[groups])
        sums._denominator = _ExactSums(self.denominator[groups])
        sums.n = int(sums.denominator.sum())
        return sums

    def add(self, groups: Ints, numerator: Floats | Bools | Ints, denominator: Floats | Ids | Ints | None) -> None:
        """Adds one term per target. ``denominator`` is None if other sums share it and have already added it."""
        self._numerator.add(groups, numerator.astype(np.float64, copy=False))
        if denominator is not None:
            self._denominator.add(groups, denominator.astype(np.float64, copy=False))
        self.n += len(groups)

    def estimate(self, within: Range = "any") -> Estimate:
        """Returns Σ numerator / Σ denominator over all groups, with its error and bounds ``within`` its range."""
        denominator = self.denominator
        total = self._denominator.total()
        count = int(np.count_nonzero(denominator))
        if total == 0:
            return Estimate(math.nan, None, self.n, count)
        value = float(self._numerator.total() / total)
        if count < FEWEST or not math.isfinite(value):
            return Estimate(value, None, self.n, count)
        share, residual = denominator / float(total), self._residuals(value)
        variance = float((residual**2 / (1 - share)).sum()) / float(total) ** 2
        freedom = min(count - 1.0, float((share**2).sum() ** 2 / (share**4).sum()))
        estimate = Estimate(value, math.sqrt(variance), self.n, count, freedom)
        if within == "share" and self._is_yes_or_no():
            return _yes_or_no(estimate)
        return with_bounds(estimate, within, self.skewness(value))

    def _is_yes_or_no(self) -> bool:
        """Is each group's share either 0 or 1?"""
        numerator, denominator = self.numerator, self.denominator
        return bool(((numerator == 0) | (numerator == denominator)).all())

    def _residuals(self, mean: float) -> Floats:
        """Returns how far each group's sum is from what the mean expects; rounding errors are 0."""
        numerator, expected = self.numerator, mean * self.denominator
        residuals = numerator - expected
        residuals[np.abs(residuals) <= ROUNDING * (np.abs(numerator) + np.abs(expected))] = 0
        return residuals

    def skewness(self, mean: float | None = None) -> float:
        """The skewness to expect of the mean: more than these groups show of it, as the module's text says."""
        residual = self._residuals(self.estimate().value if mean is None else mean)
        largest = float(np.abs(residual).max(initial=0.0))
        if not 0 < largest < math.inf:
            return 0.0
        residual = residual / largest  # squares and cubes stay in range
        spread = float((residual**2).sum())
        unequal = np.count_nonzero(self.denominator) / self.effective
        return TAIL * float(unequal) * float((residual**3).sum()) / float(spread**1.5)

    @property
    def effective(self) -> float:
        """How many equal groups would tell as much: (Σ n_g)² / Σ n_g²."""
        denominator = self.denominator
        total = float((denominator**2).sum())
        return float(denominator.sum() ** 2 / total) if total else 0.0


def reach(freedom: float, skewness: float, tail: float = (1 - LEVEL) / 2) -> float:
    """How many standard errors lie between a mean and its bound on one side, by Hall; by Student's t without skewness.

    ``skewness`` is positive if the long tail lies on this side. ``tail`` is the probability beyond the bound.

    >>> [round(reach(9.0, skewness), 2) for skewness in (-1.0, 0.0, 0.2, 10.0)]
    [2.26, 2.26, 2.78, 9.37]
    """
    from scipy.special import stdtrit  # slow to import, and `scoremode --help` must be fast

    z = float(stdtrit(freedom, 1 - tail))
    if skewness < NO_TAIL:
        return z
    t = 3 * (1 - math.cbrt(1 - skewness * z - skewness**2 / 6)) / skewness
    return t if skewness * t <= FLAT else 2 * z + math.sqrt(4 * z**2 + 3)


def beyond(distance: float, freedom: float, skewness: float) -> float:
    """The probability of a mean so many standard errors on the other side of a value: the inverse of ``reach``.

    >>> round(beyond(reach(9.0, 0.2, 0.05), 9.0, 0.2), 6), round(beyond(reach(9.0, 10.0, 0.05), 9.0, 10.0), 6)
    (0.05, 0.05)
    """
    from scipy.special import stdtr

    if distance > 0 and skewness >= NO_TAIL:
        k = min(skewness, FLAT / distance)
        distance = (1 - (1 - k * distance / 3) ** 3) / k - k / 6
    return float(stdtr(freedom, -distance))


def with_bounds(e: Estimate, within: Range = "any", skewness: float = 0.0) -> Estimate:
    """Returns the estimate with its bounds, by Student's t on the scale of its range, and by Hall for a long tail.

    >>> share = with_bounds(Estimate(1.0, 0.0, 6, 6, 5.0), "share")
    >>> round(share.low, 3), share.high
    (0.541, 1.0)
    """
    if e.stderr is None or e.freedom is None:
        return e
    p = e.value
    if within == "share" and (e.stderr == 0 or not 0 < p < 1):  # rounding may put a mean of ones just above 1
        return _yes_or_no(e)
    error = reach(e.freedom, 0.0) * e.stderr
    if within == "share":
        less, more = (_exp(sign * error / (p * (1 - p))) for sign in (1, -1))
        return replace(e, low=p / (p + (1 - p) * less), high=p / (p + (1 - p) * more))
    above = p + reach(e.freedom, skewness) * e.stderr
    if within == "positive" and p > 0:
        return replace(e, low=p * math.exp(-error / p), high=max(above, p * _exp(error / p)))
    if within == "change":
        return replace(e, low=p - reach(e.freedom, -skewness) * e.stderr, high=above)
    return replace(e, low=p - error, high=p + error)


def _yes_or_no(e: Estimate) -> Estimate:
    """The bounds of a share whose groups each say yes or no. Its degrees of freedom tell how many groups that is."""
    low, high = _of_groups(min(1.0, max(0.0, e.value)), (e.freedom or 0.0) + 1)
    return replace(e, low=min(e.value, low), high=max(e.value, high))


def _of_groups(share: float, groups: float) -> tuple[float, float]:
    """Returns the bounds of Clopper and Pearson for a share of so many groups, each of which says yes or no."""
    from scipy.special import betaincinv

    yes, no, tail = share * groups, (1 - share) * groups, (1 - LEVEL) / 2
    low = float(betaincinv(yes, no + 1, tail)) if yes else 0.0
    return low, float(betaincinv(yes + 1, no, 1 - tail)) if no else 1.0


def transformed(e: Estimate, to: Callable[[float], float], slope: float) -> Estimate:
    """Applies an increasing function to an estimate: to first order for the error, exactly for the bounds."""
    stderr = None if e.stderr is None else e.stderr * slope
    low, high = (None if bound is None else to(bound) for bound in (e.low, e.high))
    return replace(e, value=to(e.value), stderr=stderr, low=low, high=high)


def ratio(numerator: Floats | Bools, denominator: Floats | Ids | Ints, groups: Ints, within: Range = "any") -> Estimate:
    """Returns Σ numerator / Σ denominator over all targets, with the error over their groups."""
    sums = GroupSums(int(groups.max()) + 1 if len(groups) else 0)
    sums.add(groups, numerator, denominator)
    return sums.estimate(within)


def exponential(mean: Estimate) -> Estimate:
    """Returns exp of an estimate; without an error if it is infinite."""
    value = _exp(mean.value)
    if not math.isfinite(value):
        return Estimate(value, None, mean.n, mean.groups)
    return transformed(mean, _exp, value)


def perplexities(logprob: Floats, document: Ints) -> Floats:
    """The perplexity of each document that has targets: exp of its mean surprise."""
    documents, index = np.unique(document, return_inverse=True)
    nll = GroupSums(len(documents))
    nll.add(index, -logprob, np.ones(len(index)))
    with np.errstate(over="ignore", invalid="ignore"):
        perplexity: Floats = np.exp(nll.numerator / nll.denominator)
    return perplexity


def _exp(x: float) -> float:
    return math.exp(x) if not x >= 700 else math.inf


def quantiles(values: Floats, fractions: Mapping[str, float]) -> dict[str, float]:
    """Interpolates named quantiles between two values; infinite only if one of the two is, NaN if there are no values.

    >>> quantiles(np.array([0.0, 1.0, np.inf]), {"low": 0.25, "median": 0.5})
    {'low': 0.5, 'median': 1.0}
    """
    if not len(values):
        return dict.fromkeys(fractions, math.nan)
    last = len(values) - 1
    places = {name: math.floor(fraction * last) for name, fraction in fractions.items()}
    both = sorted({min(place + more, last) for place in places.values() for more in (0, 1)})
    ordered, by_name = np.partition(values, both), {}
    for name, place in places.items():
        below, above = float(ordered[place]), float(ordered[min(place + 1, last)])
        share = fractions[name] * last - place
        if share == 0:  # a case of its own, because 0 · ∞ is NaN
            by_name[name] = below
        else:
            by_name[name] = below + share * (above - below) if math.isfinite(below) else math.inf
    return by_name


def as_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Returns estimates as plain data. Infinity becomes None, because JSON has none. NaN estimates are omitted."""
    return {
        name: {field: value if isinstance(value, int) else finite_or_none(value) for field, value in asdict(e).items()}
        for name, e in estimates.items()
        if not math.isnan(e.value)
    }


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def error_fields(name: str) -> tuple[str, ...]:
    """Returns the names of a statistic's fields if it has an error: its value, the error and the bounds."""
    return name, f"{name}_stderr", f"{name}_low", f"{name}_high"


def with_error_fields(name: str, e: Estimate | None) -> dict[str, float | None]:
    """Returns an estimate as fields for JSON. Infinite, NaN or missing values become None.

    >>> with_error_fields("share", Estimate(0.5, 0.1, 10, 10))
    {'share': 0.5, 'share_stderr': 0.1, 'share_low': None, 'share_high': None}
    """
    values = (None,) * 4 if e is None else (e.value, e.stderr, e.low, e.high)
    return dict(zip(error_fields(name), map(finite_or_none, values), strict=True))


def square_root(square: Estimate) -> Estimate:
    """The square root of an estimate; the error of zero is zero."""
    value = math.sqrt(square.value)
    return transformed(square, lambda x: math.sqrt(max(x, 0.0)), 1 / (2 * value) if value else 0.0)  # NaN stays NaN
