"""Which precision each unit of a model gets: the least damage that a number of bits allows, or the fewest bits.

The damage of a mixture is predicted as the sum of the damages that were measured for its units one by one. Choosing one
option per unit is then a knapsack problem. It is solved unit by unit: sums of choices that another sum beats in both
bits and damage are dropped, and so are sums that even a fractional choice of the other units could not make better than
the best mixture that is known. What is left holds the best mixture. If too many sums are left, only some are kept; the
result then says how far from the best it may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scoremode.errors import OptionError
from scoremode.values import Floats, Ints

MOST_SUMS = 50_000  # that are kept after a unit
ROUNDING = 1e-9  # a sum may exceed the limit by this share: sums of floating-point numbers are not exact


@dataclass(frozen=True, slots=True)
class Option:
    """One available precision of a unit."""

    name: str  # the candidate that it comes from, or the baseline
    bits: float  # stored bits of the whole unit
    damage: float  # KL in nats per token, measured with only this unit swapped


@dataclass(frozen=True, slots=True)
class Allocation:
    """One option for each unit."""

    chosen: Mapping[str, Option]  # by unit
    bits_per_weight: float
    predicted: float  # KL in nats per token: the sum of the damages
    gap: float  # the best mixture is better by at most this, in nats or in bits per weight; 0: this is the best

    @property
    def used(self) -> dict[str, int]:
        """How many units get each option, the most frequent first."""
        names = [option.name for option in self.chosen.values()]
        return dict(sorted(((name, names.count(name)) for name in dict.fromkeys(names)), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class _Items:
    """The useful options of a unit: the cost rises, the value falls."""

    cost: Floats
    value: Floats
    index: Ints  # in the unit's options


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
    _require_sound(weights, options, bits_budget, kl_budget)
    units, total = list(weights), sum(weights.values())
    if bits_budget is not None:
        items = [_useful([(option.bits, option.damage) for option in options[unit]]) for unit in units]
        picked, gap = _solve(items, bits_budget * total, _least_bits(items, total))
    else:
        items = [_useful([(option.damage, option.bits) for option in options[unit]]) for unit in units]
        assert kl_budget is not None
        picked, gap = _solve(items, kl_budget, _least_damage(items))
        gap /= total
    chosen = {unit: options[unit][pick] for unit, pick in zip(units, picked, strict=True)}
    return Allocation(
        chosen,
        math.fsum(option.bits for option in chosen.values()) / total,
        math.fsum(option.damage for option in chosen.values()),
        gap,
    )


# ── input ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _require_sound(
    weights: Mapping[str, int],
    options: Mapping[str, Sequence[Option]],
    bits_budget: float | None,
    kl_budget: float | None,
) -> None:
    if (bits_budget is None) == (kl_budget is None):
        raise OptionError("a recipe needs a budget", fix="give either --bits-budget or --kl-budget")
    for flag, budget in (("--bits-budget", bits_budget), ("--kl-budget", kl_budget)):
        if budget is not None and not (math.isfinite(budget) and budget >= 0):
            raise OptionError(f"{flag} is {budget}", fix="give a number that is not negative")
    if not weights or sum(weights.values()) <= 0 or min(weights.values()) < 0:
        raise OptionError("there are no weights to choose a precision for", fix="give a model with layers")
    for unit in weights:
        if not options.get(unit):
            raise OptionError(f"no precision of {unit} was measured", fix="measure all units first")
        for option in options[unit]:
            if not (math.isfinite(option.bits) and option.bits >= 0 and math.isfinite(option.damage)):
                raise OptionError(f"{option.name} has no bits or no damage for {unit}", fix="measure all units first")


def _least_bits(items: Sequence[_Items], total: int) -> str:
    least = sum(float(item.cost[0]) for item in items) / total
    return f"--bits-budget is too small: the smallest options take {least:.4g} bits per weight"


def _least_damage(items: Sequence[_Items]) -> str:
    least = sum(float(item.cost[0]) for item in items)
    return f"--kl-budget is too small: the best options have a KL of {least:.4g}"


def _useful(pairs: Sequence[tuple[float, float]]) -> _Items:
    """The (cost, value) pairs that no other beats in both, from the cheapest on."""
    order = sorted(range(len(pairs)), key=lambda i: (*pairs[i], i))
    kept: list[int] = []
    for i in order:
        if not kept or pairs[i][1] < pairs[kept[-1]][1]:
            kept.append(i)
    return _Items(
        np.array([pairs[i][0] for i in kept]), np.array([pairs[i][1] for i in kept]), np.array(kept, np.int64)
    )


# ── the knapsack: the least value whose cost stays within a limit ────────────────────────────────────────────────────
def _solve(items: Sequence[_Items], limit: float, refusal: str) -> tuple[list[int], float]:
    """The chosen option of each unit, and how much better the best choice may be at most."""
    limit += ROUNDING * abs(limit)
    order = sorted(range(len(items)), key=lambda i: -float(items[i].value[0] - items[i].value[-1]))
    ordered = [items[i] for i in order]
    bounds = _suffix_bounds(ordered)
    if bounds[0].least_cost > limit:
        raise OptionError(refusal, fix="raise the budget, or add candidates")
    best = _greedy(ordered, limit)
    best_value = _total(ordered, best)
    found, is_whole = _search(ordered, bounds, limit, best_value)
    if found is not None and _total(ordered, found) <= best_value:
        best, best_value = found, _total(ordered, found)
    picked = [0] * len(items)
    for place, choice in zip(order, best, strict=True):
        picked[place] = int(items[place].index[choice])
    lowest = float(bounds[0].least_value(np.array([limit]))[0])
    return picked, 0.0 if is_whole else max(best_value - lowest, 0.0)


def _total(items: Sequence[_Items], choices: Sequence[int]) -> float:
    return math.fsum(float(item.value[choice]) for item, choice in zip(items, choices, strict=True))


@dataclass(frozen=True, slots=True)
class _Bound:
    """The least value of some units if options could be mixed in fractions: convex and falling in the cost."""

    costs: Floats
    values: Floats

    @property
    def least_cost(self) -> float:
        return float(self.costs[0])

    def least_value(self, limits: Floats) -> Floats:
        return np.interp(limits, self.costs, self.values)


def _hull(item: _Items) -> list[tuple[float, float, int]]:
    """Steps from one option to the next along the lower hull of a unit: (cost, value, option), steepest first."""
    corners = [0]
    for i in range(1, len(item.cost)):
        while len(corners) > 1 and _slope(item, corners[-1], i) <= _slope(item, corners[-2], corners[-1]):
            corners.pop()
        corners.append(i)
    return [(float(item.cost[b] - item.cost[a]), float(item.value[b] - item.value[a]), b) for a, b in pairwise(corners)]


def _slope(item: _Items, a: int, b: int) -> float:
    return float((item.value[b] - item.value[a]) / (item.cost[b] - item.cost[a]))


def _suffix_bounds(items: Sequence[_Items]) -> list[_Bound]:
    """The bound of the units from each on; the last is of no units."""
    steps: list[tuple[float, float]] = []
    cost = value = 0.0
    found = [_Bound(np.zeros(1), np.zeros(1))]
    for item in reversed(items):
        steps += [(c, v) for c, v, _ in _hull(item)]
        steps.sort(key=lambda step: step[1] / step[0])
        cost, value = cost + float(item.cost[0]), value + float(item.value[0])
        sums = np.cumsum(np.array([(cost, value), *steps]), axis=0)
        found.append(_Bound(sums[:, 0], sums[:, 1]))
    return found[::-1]


def _greedy(items: Sequence[_Items], limit: float) -> list[int]:
    """A good choice: all steps of the hulls that still fit, the steepest first."""
    choices = [0] * len(items)
    cost = sum(float(item.cost[0]) for item in items)
    steps = sorted((v / c, place, to) for place, item in enumerate(items) for c, v, to in _hull(item))
    for _, place, to in steps:
        item = items[place]
        more = float(item.cost[to] - item.cost[choices[place]])
        if to > choices[place] and cost + more <= limit:
            choices[place], cost = to, cost + more
    return choices


def _search(
    items: Sequence[_Items], bounds: Sequence[_Bound], limit: float, best: float
) -> tuple[list[int] | None, bool]:
    """The best choice, or None if none is better than ``best``; False if sums had to be dropped."""
    best += ROUNDING * abs(best)
    cost, value = np.zeros(1), np.zeros(1)
    trail: list[tuple[Ints, Ints]] = []  # of each unit: which sum was continued, and with which option
    is_whole = True
    for item, rest in zip(items, bounds[1:], strict=True):
        costs, values = (cost[:, None] + item.cost).ravel(), (value[:, None] + item.value).ravel()
        room = limit - costs
        useful = np.flatnonzero((room >= rest.least_cost) & (values + rest.least_value(room) <= best))
        useful = useful[np.lexsort((values[useful], costs[useful]))]
        lowest = np.minimum.accumulate(values[useful])
        useful = useful[np.r_[True, lowest[1:] < lowest[:-1]]] if len(useful) else useful
        if len(useful) > MOST_SUMS:
            is_whole = False
            useful = useful[np.linspace(0, len(useful) - 1, MOST_SUMS).astype(np.int64)]
        if not len(useful):
            return None, is_whole
        cost, value = costs[useful], values[useful]
        trail.append((useful // len(item.cost), useful % len(item.cost)))
    at, choices = int(np.argmin(value)), []
    for parents, picks in reversed(trail):
        choices.append(int(picks[at]))
        at = int(parents[at])
    return choices[::-1], is_whole
