"""Rank candidates, and say which of them cannot be told apart.

Two candidates can be told apart if the 95 % bounds of their difference exclude zero, and cannot if it has no bounds.
Given comparisons, the difference is taken target by target and its bounds from the groups of the text, so that what
both candidates share cancels. Given only statistics, the two errors are combined as if they were independent, which is
never too small for candidates that are positively correlated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from scoremode.errors import OptionError, RunError, did_you_mean, harmless
from scoremode.statistics.comparison import (
    Comparison,
    Terms,
    comparison_statistics,
    terms_of_difference,
    terms_of_distance,
)
from scoremode.statistics.estimate import with_bounds
from scoremode.values import Estimate

BETTER = {
    "kl_mean": -1,
    "ppl_ratio": -1,
    "log_ppl_ratio": -1,
    "worse": -1,
    "same_top": 1,
    "delta_logprob_mean": 1,
    "delta_p_mean": 1,
}
"""The statistics that candidates can be ranked by, and whether more is better (1) or less (-1)."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One candidate's place. Candidates that cannot be told apart from the first one of a place share it."""

    place: int | None  # 1 is the best; None if the value is not known
    name: str
    value: float | None
    stderr: float | None
    tied_with: tuple[str, ...]  # every candidate that it cannot be told apart from, also across places


def rank(candidates: Sequence[Comparison] | Sequence[Mapping[str, Any]], by: str = "kl_mean") -> list[Ranked]:
    """The candidates from best to worst by one of BETTER; those without a value come last and have no place.

    A place ends at the first candidate that can be told apart from the best one of that place. (Ties between
    neighbours alone would chain: a like b, b like c, …, until the best shares a place with the worst.)

    >>> error = {"kl_mean_stderr": 0.001, "freedom": 9.0}
    >>> known = [{"name": n, "kl_mean": v, **error} for n, v in (("a", 0.1), ("b", 0.02), ("c", 0.021))]
    >>> [(r.place, r.name, r.tied_with) for r in rank(known)]
    [(1, 'b', ('c',)), (1, 'c', ('b',)), (3, 'a', ())]
    """
    if by not in BETTER:
        raise OptionError(f"candidates cannot be ranked by '{harmless(by)}'", fix=did_you_mean(by, BETTER))
    paired = bool(candidates) and all(isinstance(c, Comparison) for c in candidates)
    comparisons = cast("Sequence[Comparison]", candidates) if paired else ()
    _require_one_question(comparisons)
    rows: list[Mapping[str, Any]] = (
        [comparison_statistics(c) for c in comparisons]
        if paired
        else list(cast("Sequence[Mapping[str, Any]]", candidates))
    )
    known = sorted(
        (i for i, row in enumerate(rows) if row.get(by) is not None), key=lambda i: -BETTER[by] * rows[i][by]
    )
    tied = _ties(rows, comparisons, known, by)
    found: list[Ranked] = []
    first, place = -1, 0
    for position, i in enumerate(known):
        if first < 0 or (first, i) not in tied:
            first, place = i, position + 1
        found.append(_ranked(rows, i, by, place, tuple(rows[j]["name"] for j in known if (i, j) in tied)))
    return found + [_ranked(rows, i, by, None, ()) for i in range(len(rows)) if i not in known]


def closest(comparisons: Sequence[Comparison]) -> list[int]:
    """Index of the candidate closest to the baseline, then of those that cannot be told apart from it.

    By mean KL if all have it, else by how far the perplexity ratio is from 1 in either direction. Empty if no candidate
    has a value.
    """
    _require_one_question(comparisons)
    if all(c.kl is not None for c in comparisons):
        place = {c.name: i for i, c in enumerate(comparisons)}
        ranked = [entry for entry in rank(comparisons) if entry.place is not None]
        return [place[entry.name] for entry in ranked if entry is ranked[0] or entry.name in ranked[0].tied_with]
    parts = [terms_of_distance(c) for c in comparisons]
    distances = [part.estimate().value for part in parts]
    known = sorted((i for i, x in enumerate(distances) if math.isfinite(x)), key=lambda i: abs(distances[i]))
    return [i for i in known if i == known[0] or _same_distance(parts[known[0]], parts[i])]


def _same_distance(a: Terms, b: Terms) -> bool:
    """Do the bounds of the difference of two distances contain zero? The targets, and so the weights, are the same."""
    gap = Terms(len(a.groups))
    signs = [math.copysign(1, part.estimate().value) for part in (a, b)]
    gap.add(a.groups, signs[0] * a.numerator - signs[1] * b.numerator, a.denominator)
    found = gap.estimate()
    return found.low is None or found.high is None or found.low <= 0 <= found.high


def _ranked(rows: Sequence[Mapping[str, Any]], i: int, by: str, place: int | None, tied: tuple[str, ...]) -> Ranked:
    return Ranked(place, rows[i]["name"], rows[i].get(by), rows[i].get(f"{by}_stderr"), tied)


def _require_one_question(comparisons: Sequence[Comparison]) -> None:
    """Candidates are only comparable on the same targets, against the same baseline."""
    for c in comparisons[1:]:
        first = comparisons[0]
        same_model = c.baseline.manifest.get("model_fingerprint") == first.baseline.manifest.get("model_fingerprint")
        if c.baseline.plan_digest != first.baseline.plan_digest or not np.array_equal(c.groups, first.groups):
            raise RunError(
                f"{first.name} and {c.name} were scored by different plans", fix="compare them with one command"
            )
        if not same_model:
            raise RunError(f"{first.name} and {c.name} have different baselines", fix="compare them with one command")


def _ties(
    rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison], known: Sequence[int], by: str
) -> set[tuple[int, int]]:
    """Every pair, in both orders, that cannot be told apart."""
    found: set[tuple[int, int]] = set()
    for at, i in enumerate(known):
        for j in known[at + 1 :]:
            if comparisons:
                gap = terms_of_difference(comparisons[i], comparisons[j], by).estimate()
            else:
                gap = _independent(rows[i], rows[j], by)
            if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
                found |= {(i, j), (j, i)}
    return found


def _independent(a: Mapping[str, Any], b: Mapping[str, Any], by: str) -> Estimate:
    """The difference of two numbers, as if their errors were independent."""
    errors, freedoms = [[row.get(name) for row in (a, b)] for name in (f"{by}_stderr", "freedom")]
    known = None not in errors and None not in freedoms
    stderr = math.hypot(*cast("list[float]", errors)) if known else None
    return with_bounds(Estimate(a[by] - b[by], stderr, 0, 0, min(cast("list[float]", freedoms)) if known else None))
