"""Which precision each unit of a model gets: the least damage that a number of bits allows, or the fewest bits.

The damage of a mixture is predicted as the sum of the damages that were measured for its units one by one. Choosing one
option per unit is then a knapsack problem, which SciPy's solver of integer programs (HiGHS) solves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.errors import OptionError
from scoremode.values import Floats, Ints

ROUNDING = 1e-9  # a sum may exceed the limit by this share: sums of floating-point numbers are not exact
TOLERANCE = 1e-6  # limits are scaled to 1, and the solver may exceed that by so much
LARGE = 1e4  # the sum of all values that the solver sees: it tells values apart that differ by 1e-6 or more


@dataclass(frozen=True, slots=True)
class Option:
    name: str  # the candidate that it comes from, or the baseline
    bits: float  # stored bits of the whole unit
    damage: float  # KL in nats per token, measured with only this unit swapped


@dataclass(frozen=True, slots=True)
class Allocation:
    chosen: Mapping[str, Option]  # by unit
    bits_per_weight: float
    predicted: float  # KL in nats per token: the sum of the damages
    gap: float  # the best mixture is better by at most this, in nats or in bits per weight; 0: this is the best


def allocate(
    weights: Mapping[str, int],
    options: Mapping[str, Sequence[Option]],
    *,
    bits_budget: float | None = None,
    kl_budget: float | None = None,
) -> Allocation:
    """Chooses an option for each unit. ``weights`` has the number of weights of each unit, ``options`` its options.

    With ``bits_budget``, mean bits per weight over all units: the least damage. With ``kl_budget``: the fewest bits.

    >>> options = {"a": [Option("4 bit", 40, 0.5), Option("8 bit", 80, 0.1)], "b": [Option("4 bit", 40, 0.2)]}
    >>> allocate({"a": 10, "b": 10}, options, bits_budget=6).chosen["a"].name
    '8 bit'
    """
    for unit, own in options.items():
        if not all(math.isfinite(option.damage) for option in own):
            raise OptionError(f"the KL of {unit} is not finite", fix="leave the candidate out")
    total, listed = sum(weights.values()), [list(options[unit]) for unit in weights]
    if bits_budget is not None:
        picked, gap = _solve(listed, "bits", "damage", bits_budget * total, total)
    else:
        assert kl_budget is not None, "one of the two budgets"
        picked, gap = _solve(listed, "damage", "bits", kl_budget, total)
        gap /= total
    chosen = dict(zip(weights, picked, strict=True))
    return Allocation(
        chosen,
        math.fsum(option.bits for option in picked) / total,
        math.fsum(option.damage for option in picked),
        gap,
    )


# ── the knapsack: the least value whose cost stays within a limit ────────────────────────────────────────────────────
def _solve(
    units: Sequence[Sequence[Option]], cost: str, value: str, limit: float, total: int
) -> tuple[list[Option], float]:
    """Returns the chosen option of each unit, and how much better the best choice may be at most."""
    least = [min(getattr(option, cost) for option in unit) for unit in units]
    left = limit + ROUNDING * abs(limit) - math.fsum(least)
    if left < 0:
        lowest = math.fsum(least)
        what = (
            f"--bits-budget is too small: the smallest options take {lowest / total:.4g} bits per weight"
            if cost == "bits"
            else f"--kl-budget is too small: the best options have a KL of {lowest:.4g}"
        )
        raise OptionError(what, fix="raise the budget, or add candidates")
    flat = [
        (number, option, getattr(option, cost) - low)
        for number, (unit, low) in enumerate(zip(units, least, strict=True))
        for option in unit
        if getattr(option, cost) - low <= left
    ]
    extra, values = (np.array(one) for one in zip(*((c, getattr(o, value)) for _, o, c in flat), strict=True))
    picked, bound = _chosen([number for number, *_ in flat], extra / left if left else extra, values, 1.0)
    if extra[picked].sum() > left:  # by less than the solver's tolerance
        picked, _ = _chosen([number for number, *_ in flat], extra / left, values, 1.0 - 2 * TOLERANCE)
    else:
        bound = math.fsum(values[picked])
    return [flat[i][1] for i in picked], math.fsum(values[picked]) - bound


def _chosen(unit: Sequence[int], cost: Floats, value: Floats, limit: float) -> tuple[Ints, float]:
    """Returns the indices of one option per unit with the least sum of values, and a bound below that sum."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array

    one_each = csr_array((np.ones(len(unit)), (unit, np.arange(len(unit)))))
    scale = LARGE / (np.abs(value).sum() or 1.0)
    found = milp(
        value * scale,
        integrality=np.ones(len(unit)),
        bounds=(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(cost[None], -np.inf, limit)],
        options={"mip_rel_gap": 0},
    )
    assert found.x is not None, "the cheapest options are within the limit"
    return np.flatnonzero(found.x > 0.5), float(found.mip_dual_bound) / scale
