"""Means by depth in the window: does a difference grow with the context?

depth of a target   its distance from the first scored token of its window
stretches           0 to 63, 64 to 127, 128 to 255, …: each is as long as all before it, so that windows of 8k to 128k
                    tokens have ten rows, and deep ones have enough targets for an error
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from scoremode.core.statistics.paired import PairedRuns
from scoremode.core.statistics.parts import PairedPart, means_by_part, paired_means
from scoremode.core.store.run import Run
from scoremode.values import Estimate, Floats, Ints, Range

FIRST = 64  # targets of a window in the first stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthMeans(PairedPart):
    """Means over the targets at some depths of their windows, with errors over the groups of these targets."""

    first: int  # the smallest depth
    last: int  # the largest

    def as_json(self) -> dict[str, float | str | None]:
        return {"first": self.first, "last": self.last, **PairedPart.as_json(self)}


def depths_of(run: Run) -> Ints:
    """Returns each target's distance from its window's first scored token."""
    windows, index = np.unique(run.facts.window, return_inverse=True)
    first = np.full(len(windows), np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, index, run.facts.token)
    return run.facts.token - first[index]


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


def _stretches(depth: Ints, edges: Floats | Ints) -> Ints:
    """Returns the stretch of each target, between two edges."""
    return np.clip(np.searchsorted(edges, depth, side="right") - 1, 0, len(edges) - 2)


def means_by_stretch(
    values: Floats, depth: Ints, groups: Ints, edges: Floats | Ints, within: Range = "any"
) -> list[Estimate]:
    """Returns the mean of the finite values in each stretch between two edges: NaN if there is no value."""
    means = means_by_part([(values, within)], _stretches(depth, edges), groups, len(edges) - 1)
    return [mean for (mean,) in means]


def by_depth(runs: PairedRuns) -> list[DepthMeans]:
    """Returns the means of two runs in stretches of depth; a stretch without a target is left out."""
    depth = depths_of(runs.baseline)
    edges = depth_edges(int(depth.max(initial=0)))
    ends = zip(edges.tolist(), edges[1:].tolist(), strict=False)
    makers = [partial(DepthMeans, first=first, last=end - 1) for first, end in ends]
    return paired_means(runs, _stretches(depth, edges), makers)
