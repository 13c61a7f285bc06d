"""Chooses which windows are computed together: those that share a prompt, and other batches for the noise floor.

Several groups of windows that share a prompt are put into one batch, so that small groups fill a batch as well:

choices of three questions          fed first, once each      then, after a copy of the cache
a a a a│x                           a a a                     a│x
a a a a│y y          3 tokens are   b b b                     a│y y
b b b│z              common to all  c c c                     z
b b b│w w                                                     w w
c c c c│v …                                                   …

All prompts of a batch are fed up to the length of the shortest, so the cache has no padding and needs no mask. The
remaining tokens of a longer prompt are computed once for each of its windows. They are few, because prompts of almost
equal length are put together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scoremode.core.engine.batching import PADDING_SHARE, common_prefix
from scoremode.core.engine.distributions import IndexedWindow
from scoremode.core.scores.answers import Window, WindowSource
from scoremode.values import Bools, Ids, Ints

PASS_WEIGHTS = 10**8  # weights of a model that a CPU multiplies with one token in the time of a pass's fixed cost
LEAST_PASS, MOST_PASS = 8, 512  # tokens; a GPU computes hundreds of tokens in the time of a pass's fixed cost
FILLED = 8  # a pass should compute at least this many times its fixed cost
WORTH_SHARING = 1 / 4  # the least part of a window worth sharing if windows of different questions start alike

PADDING = 3  # tokens that are added after a window while the noise floor is measured


def cost_of_a_pass(weights: int, kind: str) -> int:
    """Returns the fixed cost of a forward pass, as the number of tokens that could be computed in the same time.

    >>> cost_of_a_pass(260_000, "cpu"), cost_of_a_pass(135_000_000, "cpu"), cost_of_a_pass(8 * 10**9, "cuda")
    (384, 8, 512)
    """
    return MOST_PASS if kind != "cpu" else min(MOST_PASS, max(LEAST_PASS, PASS_WEIGHTS // max(1, weights)))


def pack(source: WindowSource, batches: list[Ints], budget: int, cost: int) -> list[Ints]:
    """Joins small groups of windows that share a prompt into one batch if their prompts are almost equally long."""
    if source.prefix_group is None:
        return batches
    groups = [batch for batch in batches if is_group(source.prefix_group[batch])]
    others = [batch for batch in batches if not is_group(source.prefix_group[batch])]
    shared = {int(group[0]): common_prefix([fed(source.window(int(i))) for i in group]) for group in groups}
    groups.sort(key=lambda group: -shared[int(group[0])])
    return [np.concatenate(part) for part in _filled(groups, shared, source.lengths, budget, cost)] + others


def is_group(numbers: Ints) -> bool:
    """Do at least two windows of a batch have the same prompt number in the plan?"""
    return len(np.unique(numbers)) < len(numbers)


def _filled(groups: list[Ints], shared: dict[int, int], lengths: Ints, budget: int, cost: int) -> list[list[Ints]]:
    """Distributes groups over batches. The groups are sorted by the length of their prompts, longest first."""
    batches: list[list[Ints]] = []
    windows = longest = longest_prompt = 0
    for group in groups:
        prompt, length = shared[int(group[0])], int(lengths[group].max())
        if batches:
            # tokens of longer prompts that this batch would feed again if this group with its shorter prompt joined it
            again = sum(len(g) * (shared[int(g[0])] - prompt) for g in batches[-1])
            fits = (len(batches[-1]) + 1) * longest_prompt <= budget
            room = (windows + len(group)) * max(longest, length) <= 4 * budget
            little = again <= cost + PADDING_SHARE * longest_prompt * len(batches[-1])
            if fits and room and little and prompt > 1:
                batches[-1].append(group)
                windows, longest = windows + len(group), max(longest, length)
                continue
        batches.append([group])
        windows, longest, longest_prompt = len(group), length, prompt
    return batches


def passes(rest: Sequence[int], most: int, cost: int) -> list[Ints]:
    """Splits windows into passes of at most ``most`` windows, by the number of tokens that each still has (``rest``).

    A window starts a new pass if that saves more padding than a pass costs.

    >>> [part.tolist() for part in passes([2, 40, 3, 38], 8, 32)]
    [[1, 3], [2, 0]]
    """
    lengths = np.asarray(rest, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    parts: list[list[int]] = []
    padding = 0
    for index in order.tolist():
        if parts:
            longest = int(lengths[parts[-1][0]])
            more = longest - int(lengths[index])
            if len(parts[-1]) < most and padding + more <= cost + PADDING_SHARE * longest * len(parts[-1]):
                parts[-1].append(index)
                padding += more
                continue
        parts.append([index])
        padding = 0
    return [np.array(part, dtype=np.int64) for part in parts]


def selected(cache: Any, places: Any) -> Any:
    """Returns a copy of some entries of a cache, to which a pass can append. The cache itself is not changed."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    replaced_not_changed = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    if replaced_not_changed:  # selecting makes new tensors, and these layers never write into existing ones
        chosen = copy.copy(cache)
        chosen.layers = [copy.copy(layer) for layer in cache.layers]
    else:
        chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(places)
    return chosen


def fed(window: Window) -> Ids:
    """Returns the tokens of a window up to the last requested row: only these are fed."""
    return window.ids[: rows_needed(window)]


def rows_needed(window: Window) -> int:
    return int(window.rows[-1]) + 1


# ── the noise floor ──────────────────────────────────────────────────────────────────────────────────────────────────
# The same windows in different batches and with different threads, as they occur in practice: another batch size, a
# batch padded for a longer window, a machine with another number of cores. The precision stays the same.
@dataclass(frozen=True, slots=True, eq=False)
class OtherBatches:
    """How windows are fed while the noise floor is measured: each in a batch of an unusual shape."""

    was_alone: Bools  # (windows,) windows that usually have their own batch
    padding: int  # tokens after the window; 0 if the model's context has no room for them

    @staticmethod
    def of(usual: list[Ints], padding: int) -> OtherBatches:
        """Makes unusual batches from ``usual``, the batches in which the engine feeds all windows otherwise."""
        sizes = np.repeat([len(batch) for batch in usual], [len(batch) for batch in usual])
        was_alone = np.zeros(len(sizes), np.bool_)
        was_alone[np.concatenate(usual)] = sizes == 1
        return OtherBatches(was_alone, padding)

    def batch(self, windows: list[IndexedWindow], fed: list[Ids]) -> list[Ids]:
        """Returns the sequences to feed for one window: padded, and twice if the window usually has its own batch."""
        ((index, _),) = windows
        longer = [np.concatenate([ids, np.zeros(self.padding, ids.dtype)]) for ids in fed]
        return longer * 2 if self.was_alone[index] else longer

    def words(self, done: Bools, threads: str) -> str:
        alone = self.was_alone[~done]
        changes = ["two windows per batch instead of one"] if alone.any() else []
        changes += ["one window per batch instead of several"] if not alone.all() else []
        changes += [f"{self.padding} tokens of padding"] if self.padding else []
        return ", ".join([*changes, *([threads] if threads else [])])


@contextmanager
def other_threads(device: torch.device) -> Iterator[str]:
    """Uses a different number of threads on a CPU, and yields a text about it. On other devices, changes nothing."""
    usual = torch.get_num_threads()
    if device.type != "cpu":
        yield ""
        return
    other = usual // 2 if usual > 1 else 2
    torch.set_num_threads(other)
    try:
        yield f"{other} thread{'s' if other > 1 else ''} instead of {usual}"
    finally:
        torch.set_num_threads(usual)
