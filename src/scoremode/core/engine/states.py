"""From hidden states to answers, for engines that have hidden states.

If the head of the model is one plain matrix, a kernel computes scores from the states and this matrix. If it is not,
the model itself turns a few states at a time into logits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import SCORES, Engine, Wanted, WholeDistributions
from scoremode.core.engine.distributions import (
    DeviceStates,
    IndexedWindow,
    LogitsOfStates,
    StatesOnDevice,
    split_columns,
    split_divergence,
    to_raw,
    with_distributions,
)
from scoremode.core.engine.options import CheckpointOptions
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.head.chunked import diverge_from_logits, score_rows
from scoremode.head.kernels import ChosenKernel, choose, describe_kernel
from scoremode.head.matrix import Head
from scoremode.head.precision import full_float32
from scoremode.values import Bools, Ints

Finish = Callable[[Tensor, list[IndexedWindow]], list[Answers]]
"""Concatenated hidden states of windows -> the answers of each window."""


class StatesEngine(Engine):
    """An engine that computes final hidden states."""

    device: torch.device  # of the states
    head: Head | None  # None: the model computes its own logits
    vocabulary: int
    choice: ChosenKernel | None = None  # the kernel that scores; None if the model computes its own logits

    def __init__(self, options: CheckpointOptions) -> None:
        self._forced_kernel, self._divergence_is_checked = options.head_kernel, False
        self._whole_divergence = options.divergence == "all"

    @abstractmethod
    def _served_logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits (n, vocabulary) for given hidden states (n, d)."""

    @abstractmethod
    def _finished(self, source: WindowSource, done: Bools, finish: Finish) -> Iterator[tuple[int, Answers]]:
        """Computes the states of all windows that are not done, and yields what ``finish`` makes of them."""

    @full_float32()
    @torch.inference_mode()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """The logits (n, vocabulary) of hidden states (n, d), from which scores are computed."""
        return self._served_logits(hidden) if self.head is None else self.head.logits(hidden)

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        needs_distributions = want.records or isinstance(want.against, WholeDistributions)
        against: DeviceStates | None = None
        if want.against is not None and not isinstance(want.against, WholeDistributions) and not want.records:
            self._check_divergence()
            against = StatesOnDevice(want.against, self.device, self.vocabulary)
        found = self._each(source, done, against, states=want.states or needs_distributions)
        if needs_distributions:
            made = LogitsOfStates(self.logits_of, self.facts.dtype, self.device, self.vocabulary)
            found = with_distributions(found, source, want, made)
        yield from found

    def diverge(self, source: WindowSource, against: DeviceStates) -> Iterator[tuple[int, Answers]]:
        """Answers of every window with the divergence from states that are on this device already."""
        self._check_divergence()
        yield from self._each(source, np.zeros(len(source), np.bool_), against, states=False)

    def _check_divergence(self) -> None:
        """Check the kernel's divergences before the first one is computed; most questions ask for none."""
        if self.head is None or self._divergence_is_checked:
            return
        with torch.inference_mode():
            choice = choose(self.head, self._forced_kernel)
        self._divergence_is_checked = True
        if self.choice is None or choice.kernel.name != self.choice.kernel.name:
            self.choice = choice
            self.facts = replace(self.facts, settings={**self.facts.settings, **describe_kernel(choice)})

    def _each(
        self, source: WindowSource, done: Bools, against: DeviceStates | None, *, states: bool
    ) -> Iterator[tuple[int, Answers]]:
        """Answers of every window that is not done, with KL if there is a baseline, and with hidden states if asked."""
        width = min(source.vocabulary or self.vocabulary, self.vocabulary)

        def finish(rows: Tensor, part: list[IndexedWindow]) -> list[Answers]:
            found = self._answers(rows, part, width) if against is None else self._with_kl(rows, part, width, against)
            if not states:
                return found
            own = torch.split(rows.cpu(), [len(w.rows) for _, w in part])
            return [replace(answers, states=to_raw(its)) for answers, its in zip(found, own, strict=True)]

        return self._finished(source, done, finish)

    def _answers(self, rows: Tensor, windows: list[IndexedWindow], width: int) -> list[Answers]:
        """The answers of windows from their rows; ids from ``width`` on get no probability."""
        if len({w.targets.shape[1] for _, w in windows}) > 1:
            parts = torch.split(rows, [len(w.rows) for _, w in windows])
            return [a for part, one in zip(parts, windows, strict=True) for a in self._answers(part, [one], width)]
        targets = _targets(windows, rows)
        if self.head is not None and self.choice is not None:
            columns = self.choice.kernel.score(rows, self.head.within(width), targets)
        else:
            columns = score_rows(rows, lambda hidden: self._served_logits(hidden)[:, :width], targets, width)
        return split_columns(columns, _ends(windows))

    def _with_kl(self, rows: Tensor, windows: list[IndexedWindow], width: int, against: DeviceStates) -> list[Answers]:
        states, targets, head_p = against.rows(windows), _targets(windows, rows), against.head.within(width)
        if self.head is not None and self.choice is not None:
            head_q = self.head.within(width)
            whole, kept = self._whole_divergence, against.kept(windows)
            found = self.choice.kernel.divergence(states, head_p, rows, head_q, targets, whole, kept)
        else:
            found = diverge_from_logits(states, head_p, rows, self._served_logits, targets)
        return split_divergence(found, _ends(windows))


def agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype, slack: float = 1.0) -> bool:
    """Are two tensors equal, up to ``slack`` × the rounding of the model's own dtype?"""
    if ours.shape != theirs.shape:
        return False
    size = theirs.abs().max().clamp_min(1.0)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 5e-3}.get(dtype, 2e-2)
    return bool(((ours - theirs).abs().max() / size) < slack * tolerance)


def _targets(windows: list[IndexedWindow], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate([w.targets for _, w in windows]).astype(np.int64)).to(like.device)


def _ends(windows: list[IndexedWindow]) -> Ints:
    return np.cumsum([len(w.rows) for _, w in windows])
