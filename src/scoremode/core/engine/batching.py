"""Groups windows of similar length into batches, so that a forward pass computes almost no padding."""

from __future__ import annotations

import numpy as np

from scoremode.core.scores.answers import WindowSource
from scoremode.values import Bools, Ids, Ints

PADDING_SHARE = 1 / 16  # the most padding in a batch, as a share of its tokens


def batches_by_length(source: WindowSource, budget: int) -> list[Ints]:
    """Returns the window indices of each batch. A batch has at most ``budget`` padded tokens, or a single window.

    The batches depend only on the source and the budget, so an interrupted run gets the same batches again. All windows
    that share a prompt form one batch, however many there are: the engine feeds their prompt once, and keeps the
    remaining tokens within its budget.
    """
    lengths = source.lengths
    everything = np.arange(len(source), dtype=np.int64)
    if source.prefix_group is None:
        return _by_length(everything, lengths, budget)
    shared = _by_group(source.prefix_group)
    alone = np.concatenate([g for g in shared if len(g) == 1] or [everything[:0]])
    return [g for g in shared if len(g) > 1] + _by_length(alone, lengths, budget)


def _by_length(windows: Ints, lengths: Ints, budget: int) -> list[Ints]:
    # longest first, so that a window that does not fit in memory fails at the start of a run, not at its end
    order = windows[np.argsort(-lengths[windows], kind="stable")]
    found: list[Ints] = []
    begin = 0
    while begin < len(order):
        longest = max(1, int(lengths[order[begin]]))
        shortest_allowed = longest * (1 - PADDING_SHARE)
        end = begin + 1
        while end < len(order) and (end - begin + 1) * longest <= budget and lengths[order[end]] >= shortest_allowed:
            end += 1
        found.append(order[begin:end])
        begin = end
    return found


def batches_side_by_side(source: WindowSource, sequences: int) -> list[Ints]:
    """Returns the window indices of each batch that is decoded side by side, the longest windows first."""
    order = np.argsort(-source.lengths, kind="stable").astype(np.int64)
    return [order[begin : begin + sequences] for begin in range(0, len(order), sequences)]


def prompt_groups(source: WindowSource) -> list[Ints]:
    """Returns groups of window indices, one group per prompt, for an engine that feeds one window at a time."""
    if source.prefix_group is None:
        return list(np.arange(len(source), dtype=np.int64)[:, None])
    return _by_group(source.prefix_group)


def _by_group(groups: Ints) -> list[Ints]:
    order = np.argsort(groups, kind="stable")
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    return [part.astype(np.int64) for part in np.split(order, edges) if len(part)]


def in_groups(source: WindowSource, done: Bools) -> tuple[Ints, Bools]:
    """Returns the windows to score, with those of one group side by side, and which windows share a prefix."""
    order, group = np.flatnonzero(~done), source.prefix_group
    if group is None:
        return order, np.zeros(len(source), np.bool_)
    _, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
    return order[np.argsort(group[order], kind="stable")], counts[inverse] > 1


def common_prefix(sequences: list[Ids]) -> int:
    """Returns the number of tokens that all sequences have in common at their start."""
    length = min(map(len, sequences))
    first = sequences[0][:length]
    for other in sequences[1:]:
        differs = np.flatnonzero(first != other[: len(first)])
        first = first[: differs[0]] if len(differs) else first
    return len(first)
