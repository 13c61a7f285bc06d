"""Means by depth in the window: does a difference grow with the context?

depth of a target   its distance from the first scored token of its window
stretches           0 to 63, 64 to 127, 128 to 255, …: each is as long as all before it, so that windows of 8k to 128k
                    tokens have ten rows, and deep ones have enough targets for an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from scoremode.core.statistics.groups import distinct
from scoremode.core.statistics.paired import PairedRuns
from scoremode.core.statistics.parts import PairedPart, Parts, means_by_part, paired_means
from scoremode.core.statistics.streams import Blocks, array_blocks
from scoremode.core.store.run import Run
from scoremode.values import Estimate, Floats, Ints, Range

FIRST = 64  # targets of a window in the first stretch

Places = Callable[[], Iterator[tuple[Ints, Ints]]]
"""Yields the depth in its window and the group of each target; every call reads from the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthMeans(PairedPart):
    """Means over the targets at some depths of their windows, with errors over the groups of these targets."""

    first: int  # the smallest depth
    last: int  # the largest

    def as_json(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last, **PairedPart.as_json(self)}


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


def in_stretches(places: Places, edges: Floats | Ints) -> Parts:
    """Returns the stretch of each target, between two edges, instead of its depth."""

    def parts() -> Iterator[tuple[Ints, Ints]]:
        for depth, group in places():
            yield np.clip(np.searchsorted(edges, depth, side="right") - 1, 0, len(edges) - 2), group

    return parts


def means_by_stretch(values: Blocks, places: Places, edges: Floats | Ints, within: Range = "any") -> list[Estimate]:
    """Returns the mean of the finite values in each stretch between two edges: NaN if there is no value."""
    parts = in_stretches(places, edges)
    found = means_by_part(lambda: ([block] for block in values()), parts, len(edges) - 1, ranges=(within,))
    return [mean for (mean,) in found]


def by_depth(runs: PairedRuns) -> list[DepthMeans]:
    """Returns the means of two runs in stretches of depth; a stretch without a target is left out."""
    places = places_of(runs.baseline, runs.groups)
    edges = depth_edges(deepest(places))
    ends = zip(edges.tolist(), edges[1:].tolist(), strict=False)
    makers = [partial(DepthMeans, first=first, last=end - 1) for first, end in ends]
    return paired_means(runs, in_stretches(places, edges), makers)
