"""Means by depth in the window: does a difference grow with the context?

depth of a target   its distance from the first scored token of its window
stretches           0 to 63, 64 to 127, 128 to 255, …: each is as long as all before it, so that windows of 8k to 128k
                    tokens have ten rows, and deep ones have enough targets for an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from scoremode.statistics.estimate import GroupSums, with_error_fields
from scoremode.statistics.groups import distinct
from scoremode.statistics.paired import PairedRuns
from scoremode.statistics.streams import Blocks, array_blocks
from scoremode.store.run import Run
from scoremode.values import Estimate, Floats, Ints

FIRST = 64  # targets of a window in the first stretch
SUMS = 1 << 20  # sums in memory at a time: with very many groups, the columns are read several times

Places = Callable[[], Iterator[tuple[Ints, Ints]]]
"""Yields the depth in its window and the group of each target; every call reads from the beginning."""


@dataclass(frozen=True, slots=True)
class DepthMeans:
    """Means over the targets at some depths of their windows, with errors over the groups of these targets."""

    first: int  # the smallest depth
    last: int  # the largest
    kl: Estimate | None  # None: not measured
    delta_logprob: Estimate
    unbounded: int  # targets that are left out because their KL or their difference of logprobs is not finite

    def as_json(self) -> dict[str, int | float | None]:
        """The numbers by name; None for those that are not known."""
        return {
            "first": self.first,
            "last": self.last,
            "targets": self.delta_logprob.n,
            "groups": self.delta_logprob.groups,
            **with_error_fields("kl_mean", self.kl),
            **with_error_fields("delta_logprob_mean", self.delta_logprob),
            "unbounded": self.unbounded,
        }


def places_of(run: Run, groups: Ints | None = None) -> Places:
    """Finds each target's distance from its window's first scored token, and its group, from ``groups`` or the run."""

    @cache
    def first_tokens() -> tuple[Ints, Ints]:
        windows = distinct(window for (window,) in run.facts.blocks("window"))
        first = np.full(len(windows), np.iinfo(np.int64).max, dtype=np.int64)
        for window, token in run.facts.blocks("window", "token"):
            np.minimum.at(first, np.searchsorted(windows, window), token)
        return windows, first

    def blocks() -> Iterator[tuple[Ints, Ints]]:
        windows, first = first_tokens()
        own = (group for (group,) in run.facts.blocks("group")) if groups is None else array_blocks(groups)
        for (window, token), group in zip(run.facts.blocks("window", "token"), own, strict=True):
            yield token - first[np.searchsorted(windows, window)], group

    return blocks


def deepest(places: Places) -> int:
    """Returns the largest depth of a target."""
    return max((int(depth.max()) for depth, _ in places() if len(depth)), default=0)


def depth_edges(last: int) -> Ints:
    """Returns where stretches begin, and the end of the last one.

    >>> depth_edges(300).tolist(), depth_edges(20).tolist()
    ([0, 64, 128, 256, 301], [0, 21])
    """
    edges, end = [0], FIRST
    while end <= last:
        edges.append(end)
        end *= 2
    return np.array([*edges, last + 1], np.int64)


def means_by_stretch(values: Blocks, places: Places, edges: Floats | Ints) -> list[Estimate]:
    """Returns the mean of the finite values in each stretch between two edges, over the groups that have values there.

    A stretch without a value has the mean NaN.
    """
    count = len(edges) - 1
    found: list[Estimate] = []
    groups = distinct(group for _, group in places())
    together = max(1, SUMS // max(1, len(groups)))
    for begin in range(0, count, together):
        wanted = range(begin, min(count, begin + together))
        sums = GroupSums(len(wanted) * len(groups))
        for block, (depth, group) in zip(values(), places(), strict=True):
            index = np.clip(np.searchsorted(edges, depth, side="right") - 1, 0, count - 1)
            here = np.isfinite(block) & (index >= wanted.start) & (index < wanted.stop)
            cell = (index[here] - wanted.start) * len(groups) + np.searchsorted(groups, group[here])
            sums.add(cell, block[here], np.ones(len(cell)))
        for cells in np.split(sums.indices, len(wanted)):
            found.append(sums.some(cells[sums.denominator[cells] > 0]).estimate())
    return found


def by_depth(runs: PairedRuns) -> list[DepthMeans]:
    """Returns the means of two runs in stretches of depth; a stretch without a target is left out."""
    places = places_of(runs.baseline, runs.groups)
    edges = depth_edges(deepest(places))

    def moved() -> Iterator[Floats]:
        for block in runs.blocks():
            with np.errstate(invalid="ignore"):
                yield block.cand - block.base

    def unbounded() -> Iterator[Floats]:
        for block, delta in zip(runs.blocks(), moved(), strict=True):
            is_finite = np.isfinite(delta) if block.kl is None else np.isfinite(delta) & np.isfinite(block.kl)
            yield (~is_finite).astype(np.float64)

    deltas, left_out = (means_by_stretch(values, places, edges) for values in (moved, unbounded))
    kls: list[Estimate] | list[None] = [None] * len(deltas)
    if (kl := runs.kl) is not None:
        kls = means_by_stretch(lambda: array_blocks(kl), places, edges)
    found = zip(edges.tolist(), edges[1:].tolist(), kls, deltas, left_out, strict=False)
    return [
        DepthMeans(first, end - 1, kl, delta, round(omitted.value * omitted.n))
        for first, end, kl, delta, omitted in found
        if omitted.n
    ]
