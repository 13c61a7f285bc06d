"""Which candidates are closest to the baseline, which cannot be told apart, and which are worth their size.

Two candidates are told apart if one has less KL group after group: Student's t of ln(KL of one / KL of the other), one
number per group of the text, at 5 % over all pairs together by Holm's method. Among equal candidates, however many, any
claim of a difference is made in at most 5 % of texts. What makes a text hard for both cancels in the ratio, and a few
hard texts do not hide what all others show, as they do in the difference of the means. The means must agree: their
difference has the same sign, and as large a one comes by chance in less than AGREES of texts. If a KL is 0 in a group,
there is no ratio, and the difference of the means alone decides. Of 10 to 16 groups, flips of the signs of ln(KL / KL)
may show a difference as well: a few wild groups cost t its power, and more groups make up for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from scoremode.core.scores.answers import measured
from scoremode.core.statistics.comparison import BY_NAME, Comparison
from scoremode.core.statistics.estimate import LEVEL, GroupSums, ratio
from scoremode.core.statistics.groups import ENOUGH, FEWEST, are_blocks, false_of_few, why_unsure
from scoremode.core.statistics.paired import PairedMeans
from scoremode.errors import RunError
from scoremode.reports.text import counted
from scoremode.values import Estimate, Floats, usable

FLIPPED = range(10, 17)  # groups; 9 have too few flips for six pairs
OF_TWO = 1.1  # × the smaller p-value, of t and of flips: false claims stay below 5 %, as docs/statistics.md shows
AGREES = 0.25  # candidates of equal means and unequal spreads are told apart less often, at little power


def closest_first(comparisons: Sequence[Comparison]) -> list[tuple[int, list[int]]]:
    """Candidates with a mean KL, the smallest first, each with the candidates that cannot be told apart from it.

    Candidates are named by their indices. If ``why_not_ranked`` has a reason, none can be told apart.
    """
    _require_one_question(comparisons)
    costs = [usable(c.statistics().get("kl_mean")) for c in comparisons]
    ranking = sorted((cost, i) for i, cost in enumerate(costs) if cost is not None)
    order = [i for _, i in ranking]
    pairs = list(combinations(order, 2))
    nothing = bool(why_not_ranked(comparisons))
    sums = {i: PairedMeans(comparisons[i]).sums(measured(BY_NAME["kl_mean"].mean)) for i in order}
    apart = told_apart([1.0 if nothing else p_of_pair(sums[i], sums[j]) for i, j in pairs])
    tied = {frozenset(pair) for pair, is_apart in zip(pairs, apart, strict=True) if not is_apart}
    return [(i, [j for j in order if {i, j} in tied]) for i in order]


def why_not_ranked(comparisons: Sequence[Comparison]) -> str:
    """Why no candidate can be told from another, whatever their numbers; '' if they can be ranked."""
    for c in comparisons:
        kind, groups = c.baseline.group_kind, c.statistics().get("groups") or 0
        if are_blocks(kind):
            return f"not ranked: ± is over {groups} blocks of {kind.rpartition(' of ')[2]}; give at least ten documents"
        if groups < FEWEST:
            return f"not ranked: {counted(groups, kind)} give no ±; give at least ten documents"
        effective = c.statistics()["groups_effective"] or ENOUGH
        if why := why_unsure(groups, effective, kind, few_documents=c.few_documents):
            return f"not ranked: {why}"
    return ""


def _require_one_question(comparisons: Sequence[Comparison]) -> None:
    """Raises RunError unless all candidates have the same targets and the same baseline."""
    for c in comparisons[1:]:
        first = comparisons[0]
        if c.baseline.plan_digest != first.baseline.plan_digest or not np.array_equal(c.groups, first.groups):
            problem = "were scored by different plans"
        elif c.baseline.manifest.get("model_fingerprint") != first.baseline.manifest.get("model_fingerprint"):
            problem = "have different baselines"
        else:
            continue
        raise RunError(f"{first.name} and {c.name} {problem}", fix="compare them with one command")


def p_of_pair(first: GroupSums, other: GroupSums) -> float:
    """The p-value of two candidates, from their KL in each group; 1 if their means do not agree."""
    kl, other_kl = first.numerator, other.numerator
    by_mean = ratio(kl - other_kl, first.denominator, first.indices)
    if not ((kl > 0) & (other_kl > 0)).all():
        return p_value(by_mean)
    logarithms = np.log(kl / other_kl)
    by_ratio = ratio(logarithms, np.ones(len(kl)), first.indices)
    if by_mean.value * by_ratio.value <= 0 or p_value(by_mean) / 2 >= AGREES:
        return 1.0
    p = p_value(by_ratio)
    return min(1.0, OF_TWO * min(p, by_flips(logarithms))) if len(kl) in FLIPPED else p


def by_flips(values: Floats) -> float:
    """The p-value of a mean of 0: the share of all choices of signs that give a sum as far from 0, or farther.

    >>> by_flips(np.arange(1.0, 11.0)), by_flips(np.array([1.0, -1.0]))
    (0.001953125, 1.0)
    """
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return float((np.abs(sums) >= abs(values.sum()) * (1 - 1e-9)).mean())


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
    apart = [False] * len(p_values)
    for left, i in zip(range(len(p_values), 0, -1), np.argsort(p_values, kind="stable").tolist(), strict=True):
        if p_values[i] > (1 - LEVEL) / left:
            break
        apart[i] = True
    return apart


def pairs_tested(comparisons: Sequence[Comparison]) -> str:
    """Says how differences were tested, for a footnote; '' for a single pair of enough groups, which needs no words."""
    comparisons = [c for c in comparisons if usable(c.statistics().get("kl_mean")) is not None]  # others have no rank
    if len(comparisons) < 2:
        return ""
    pairs, first = counted(math.comb(len(comparisons), 2), "pairs"), comparisons[0]
    kind = first.baseline.group_kind
    rate = false_of_few("ranking", first.statistics()["groups_effective"] or ENOUGH, kind)
    level = f"{1 - LEVEL:.0%}".replace("%", " %")
    sentence = f"{pairs} tested together (Holm's method), at most {level} false differences in all"
    return sentence + rate if rate or len(comparisons) > 2 else ""


# ── quality against size ─────────────────────────────────────────────────────────────────────────────────────────────
def pareto_front(sizes: Sequence[float | None], costs: Sequence[float | None]) -> list[int]:
    """Returns the indices of the candidates that no other candidate beats, from the smallest to the largest.

    One candidate beats another if it is at most as large and costs at most as much, and is better in one of the two.
    Candidates that are equal in both do not beat each other. A candidate whose size or cost is missing or not finite
    is never on the front.

    >>> pareto_front([8.5, 4.8, 4.9, 2.1], [0.001, 0.04, 0.05, 0.9])
    [3, 1, 0]
    """
    points = []
    for i, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        if size is not None and cost is not None and math.isfinite(size) and math.isfinite(cost):
            points.append((size, cost, i))
    front: list[int] = []
    best: tuple[float, float] | None = None
    for size, cost, i in sorted(points):
        if best is None or cost < best[1] or (size, cost) == best:
            front.append(i)
            best = (size, cost)
    return front
