"""Ranks candidates, and finds which of them cannot be distinguished, and which are worth their size.

Two candidates are distinguished if their difference is significant at 5 % over all pairs together, by Holm's method:
among equal candidates, however many, any claim of a difference is made in at most 5 % of texts. For one pair, the 95 %
bounds of the difference say the same. Holm's method needs only valid tests of the pairs. (The studentized range needs
equal variances and correlations, which paired differences do not have.)

From comparisons, the difference is computed target by target and its error from the groups of the text, so that the
effects that both candidates share cancel. From statistics alone, the two errors are combined as if they were
independent, which is never too small for candidates that are positively correlated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, cast

import numpy as np

from scoremode.core.scores.answers import measured
from scoremode.core.statistics.comparison import BY_NAME, STATISTICS, Comparison, fields_between_runs
from scoremode.core.statistics.estimate import LEVEL, GroupSums
from scoremode.core.statistics.groups import are_blocks
from scoremode.core.statistics.paired import PairedMeans, PairedRuns, mean_differences
from scoremode.core.statistics.statistic import Statistic
from scoremode.errors import OptionError, RunError, did_you_mean, harmless
from scoremode.values import Estimate

Pair = tuple[int, int]
"""Indices of two candidates."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One candidate's place. Candidates that cannot be distinguished from the best one of a place share that place."""

    place: int | None  # 1 is the best; None if the value is not known
    name: str
    value: float | None
    stderr: float | None
    tied_with: tuple[str, ...]  # every candidate that cannot be distinguished from this one, also across places


def rank(candidates: Sequence[Comparison] | Sequence[Mapping[str, Any]], by: str = "kl_mean") -> list[Ranked]:
    """Ranks candidates (all comparisons, or all statistics) from best to worst; those without a value have no place.

    A place ends at the first candidate that can be distinguished from the best one of that place. (Ties between
    neighbours alone would chain: a like b, b like c, …, until the best shares a place with the worst.)

    >>> error = {"kl_mean_stderr": 0.001, "freedom": 9.0}
    >>> known = [{"name": n, "kl_mean": v, **error} for n, v in (("a", 0.1), ("b", 0.02), ("c", 0.021))]
    >>> [(r.place, r.name, r.tied_with) for r in rank(known)]
    [(1, 'b', ('c',)), (1, 'c', ('b',)), (3, 'a', ())]
    """
    ranks = {statistic.name: statistic for statistic in STATISTICS if statistic.ranks}
    if by not in ranks:
        raise OptionError(f"candidates cannot be ranked by '{harmless(by)}'", fix=did_you_mean(by, ranks))
    statistic = ranks[by]
    paired = all(isinstance(c, Comparison) for c in candidates)
    means = [PairedMeans(cast("Comparison", c)) for c in candidates] if paired else []
    if means:
        _require_one_question([m.runs for m in means])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # infinities become None
            rows: list[Mapping[str, Any]] = [{"name": m.runs.name, **fields_between_runs(statistic, m)} for m in means]
    else:
        rows = list(cast("Sequence[Mapping[str, Any]]", candidates))
    known = [i for i, row in enumerate(rows) if row.get(by) is not None]
    known.sort(key=lambda i: -statistic.ranks * rows[i][by])
    pairs = list(combinations(known, 2))
    if means:
        differences = _paired_differences(means, statistic, pairs)
    else:
        differences = [_independent_difference(rows[i], rows[j], by) for i, j in pairs]
    tied = _ties(pairs, differences, [m.runs for m in means])
    found: list[Ranked] = []
    first, place = -1, 0
    for position, i in enumerate(known):
        if first < 0 or (first, i) not in tied:
            first, place = i, position + 1
        found.append(_ranked(rows, i, by, place, tuple(rows[j]["name"] for j in known if (i, j) in tied)))
    return found + [_ranked(rows, i, by, None, ()) for i in range(len(rows)) if i not in known]


def closest(comparisons: Sequence[Comparison]) -> list[int]:
    """Returns the index of the candidate closest to the baseline, then of those that cannot be distinguished from it.

    Candidates are compared by mean KL if all have it, else by how far the perplexity ratio is from 1 in either
    direction. The list is empty if no candidate has a value.
    """
    _require_one_question(comparisons)
    if all(c.kl is not None for c in comparisons):
        place = {c.name: i for i, c in enumerate(comparisons)}
        ranked = [entry for entry in rank(comparisons) if entry.place is not None]
        return [place[entry.name] for entry in ranked if entry is ranked[0] or entry.name in ranked[0].tied_with]
    sums = [_distance(PairedMeans(c)) for c in comparisons]
    distances = [one.estimate().value for one in sums]
    known = sorted((i for i, x in enumerate(distances) if math.isfinite(x)), key=lambda i: abs(distances[i]))

    pairs, differences = list(combinations(known, 2)), []
    for i, j in pairs:  # both have the same targets, and so the same weights
        gap = GroupSums(len(sums[i].indices))
        ours, theirs = (math.copysign(1, distances[k]) * sums[k].numerator for k in (i, j))
        gap.add(gap.indices, ours - theirs, sums[i].denominator)
        differences.append(gap.estimate())
    tied = _ties(pairs, differences, comparisons)
    return [i for i in known if i == known[0] or (known[0], i) in tied]


def _distance(means: PairedMeans) -> GroupSums:
    """Returns the signed distance between both perplexities; its value is 0 if they are equal."""
    if (documents := means.documents) is not None:
        return documents.with_numerator(documents.numerator - documents.denominator)
    return means.sums(measured(BY_NAME["ppl_ratio"].mean))


def _ranked(rows: Sequence[Mapping[str, Any]], i: int, by: str, place: int | None, tied: tuple[str, ...]) -> Ranked:
    return Ranked(place, rows[i]["name"], rows[i].get(by), rows[i].get(f"{by}_stderr"), tied)


def _require_one_question(comparisons: Sequence[PairedRuns]) -> None:
    """Raises RunError unless all candidates have the same targets and the same baseline."""
    for c in comparisons[1:]:
        first = comparisons[0]
        same_model = c.baseline.manifest.get("model_fingerprint") == first.baseline.manifest.get("model_fingerprint")
        if c.baseline.plan_digest != first.baseline.plan_digest or not np.array_equal(c.groups, first.groups):
            raise RunError(
                f"{first.name} and {c.name} were scored by different plans", fix="compare them with one command"
            )
        if not same_model:
            raise RunError(f"{first.name} and {c.name} have different baselines", fix="compare them with one command")


def _ties(pairs: Sequence[Pair], differences: Sequence[Estimate], runs: Sequence[PairedRuns]) -> set[Pair]:
    """Returns every pair of candidates that cannot be distinguished, in both orders; all, over blocks of one text."""
    nothing = any(are_blocks(str(one.baseline.manifest.get("stderr_groups", ""))) for one in runs)
    apart = told_apart([1.0 if nothing else p_value(difference) for difference in differences])
    tied = [pair for pair, is_apart in zip(pairs, apart, strict=True) if not is_apart]
    return {order for i, j in tied for order in ((i, j), (j, i))}


def p_value(difference: Estimate) -> float:
    """Returns the two-sided p-value by Student's t; it is 1 if the difference has no standard error.

    >>> round(p_value(Estimate(2.0, 1.0, 100, 10, freedom=9.0)), 4)
    0.0766
    """
    from scipy.special import stdtr  # slow to import, and `scoremode --help` must be fast

    if difference.stderr is None or difference.freedom is None or difference.value == 0:
        return 1.0
    if difference.stderr == 0:
        return 0.0
    return 2 * float(stdtr(difference.freedom, -abs(difference.value) / difference.stderr))


def told_apart(p_values: Sequence[float]) -> list[bool]:
    """Tests p values by Holm's method: the smallest at 5 % / pairs, the next at 5 % / (pairs - 1), … until one fails.

    >>> told_apart([0.04, 0.01, 0.02]), told_apart([0.04]), told_apart([0.03, 0.02])
    ([True, True, True], [True], [True, True])
    >>> told_apart([0.04, 0.03, 0.01])
    [False, False, True]
    """
    found = [False] * len(p_values)
    for left, i in zip(range(len(p_values), 0, -1), np.argsort(p_values, kind="stable").tolist(), strict=True):
        if p_values[i] > (1 - LEVEL) / left:
            break
        found[i] = True
    return found


def pairs_tested(candidates: int) -> str:
    """Says how differences were tested, for a footnote; '' for a single pair, which needs no correction.

    >>> pairs_tested(2), pairs_tested(4)
    ('', 'differences: 6 pairs tested together (Holm), at most 5 % false claims in all')
    """
    pairs = math.comb(candidates, 2)
    words = f"differences: {pairs:,} pairs tested together (Holm), at most {1 - LEVEL:.0%} false claims in all"
    return words.replace("%", " %") if pairs > 1 else ""


def _paired_differences(means: Sequence[PairedMeans], statistic: Statistic, pairs: Sequence[Pair]) -> list[Estimate]:
    """Returns the differences of candidates, paired by target, or by document if the method averages documents."""
    if not statistic.by_document or not means[0].runs.averages_documents:
        return mean_differences([one.runs for one in means], pairs, measured(statistic.mean))
    sums = [measured(one.documents) for one in means]
    return [sums[i].with_numerator(sums[i].numerator - sums[j].numerator).estimate() for i, j in pairs]


def _independent_difference(a: Mapping[str, Any], b: Mapping[str, Any], by: str) -> Estimate:
    """Returns the difference of two numbers, as if their errors were independent."""
    errors, freedoms = [[row.get(name) for row in (a, b)] for name in (f"{by}_stderr", "freedom")]
    known = None not in errors and None not in freedoms
    stderr = math.hypot(*cast("list[float]", errors)) if known else None
    return Estimate(a[by] - b[by], stderr, 0, 0, min(cast("list[float]", freedoms)) if known else None)


# ── quality against size ─────────────────────────────────────────────────────────────────────────────────────────────
def pareto_front(sizes: Sequence[float | None], costs: Sequence[float | None]) -> list[int]:
    """Returns the indices of the candidates that no other candidate beats, from the smallest to the largest.

    One candidate beats another if it is at most as large and costs at most as much, and is better in one of the two.
    Candidates that are equal in both do not beat each other. A candidate whose size or cost is missing or not finite
    is never on the front.

    >>> pareto_front([8.5, 4.8, 4.9, 2.1], [0.001, 0.04, 0.05, 0.9])
    [3, 1, 0]
    """
    known = []
    for i, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        if size is not None and cost is not None and math.isfinite(size) and math.isfinite(cost):
            known.append((size, cost, i))
    found: list[int] = []
    best: tuple[float, float] | None = None
    for size, cost, i in sorted(known):
        if best is None or cost < best[1] or (size, cost) == best:
            found.append(i)
            best = (size, cost)
    return found
