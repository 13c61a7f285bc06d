"""Which windows share a forward pass: by length, so that almost nothing is spent on padding."""

from __future__ import annotations

import numpy as np

from scoremode.plan.windows import WindowSource
from scoremode.values import Bools, Ids, Ints

PADDING_SHARE = 1 / 16  # of a batch's tokens, at most


def batches_by_length(source: WindowSource, budget: int) -> list[Ints]:
    """Window indices batch by batch; a batch has at most ``budget`` padded tokens, or a single window.

    Depends on the source and the budget alone: an interrupted run gets the same batches again. Windows that share
    a prompt stay together, in batches of their own, however many there are: the engine feeds their prompt once and
    keeps to its budget for the rest.
    """
    lengths = source.lengths
    everything = np.arange(len(source), dtype=np.int64)
    if source.prefix_group is None:
        return _by_length(everything, lengths, budget)
    shared = _by_group(source.prefix_group)
    alone = np.concatenate([g for g in shared if len(g) == 1] or [everything[:0]])
    return [g for g in shared if len(g) > 1] + _by_length(alone, lengths, budget)


def _by_length(windows: Ints, lengths: Ints, budget: int) -> list[Ints]:
    # longest first: what does not fit in memory fails at the start of a run, not at its end
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


def prompt_groups(source: WindowSource) -> list[Ints]:
    """Groups of window indices, one per prompt, for an engine that feeds one window at a time."""
    if source.prefix_group is None:
        return list(np.arange(len(source), dtype=np.int64)[:, None])
    return _by_group(source.prefix_group)


def _by_group(groups: Ints) -> list[Ints]:
    order = np.argsort(groups, kind="stable")
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    return [part.astype(np.int64) for part in np.split(order, edges) if len(part)]


def in_groups(source: WindowSource, done: Bools) -> tuple[Ints, Bools]:
    """The windows to score, ordered so that those of one group are neighbours; and which windows share a prefix."""
    order, group = np.flatnonzero(~done), source.prefix_group
    if group is None:
        return order, np.zeros(len(source), np.bool_)
    _, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
    return order[np.argsort(group[order], kind="stable")], counts[inverse] > 1


def common_prefix(sequences: list[Ids]) -> int:
    """The number of tokens that all sequences have in common at their beginning."""
    length = min(map(len, sequences))
    first = sequences[0][:length]
    for other in sequences[1:]:
        differs = np.flatnonzero(first != other[: len(first)])
        first = first[: differs[0]] if len(differs) else first
    return len(first)
