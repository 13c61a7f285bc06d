"""Baselines with hidden states, and their noise floor.

model ──score──▶ hidden states of every target, and the head ──▶ reference folder ──▶ StoredBaseline
model without such a head ──▶ its logits, as they come: LiveLogits, in logits.py; LiveSteps, in steps.py
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np

from scoremode.core.engine.base import Engine, NoiseFloor, StoredHead, Wanted
from scoremode.core.plan.plan import Plan
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import FAULT, Answers, Window, WindowSource
from scoremode.errors import EngineError
from scoremode.values import Bools, Floats, Ints, Raw

NOISE_WINDOWS = 8  # of the noise floor: at least so many if the plan has them, and fewer than twice as many
NOISE_TARGETS = 4096  # of the noise floor, at most, unless the first window has more


class StoredBaseline:
    """A baseline whose states lie in a reference; ``offsets`` say where the targets of each window begin in it."""

    def __init__(self, stored: Reference, plan: Plan | None = None, *, offsets: Ints | None = None) -> None:
        assert (plan is None) != (offsets is None), "a plan has its own offsets"
        self.offsets: Ints = offsets if plan is None else plan.target_offsets  # type: ignore[assignment]
        self.stored, self.dtype = stored, stored.dtype
        self.head = head_of(stored)

    @property
    def place(self) -> tuple[str, Ints]:
        """The folder, for a process that reads rows itself."""
        return str(self.stored.folder.resolve()), self.offsets

    def states(self, index: int, window: Window) -> Raw:
        return self.stored.rows(int(self.offsets[index]), len(window.rows))


def head_of(stored: Reference, ids: slice = slice(None)) -> StoredHead:
    """The head in a reference, or its rows for some ids."""
    bias = stored.head_bias()
    return StoredHead(
        weight=stored.head_weight()[ids],
        bias=None if bias is None else bias[ids],
        dtype=stored.head.dtype,
        bias_dtype=stored.head.bias_dtype or stored.head.dtype,
        vocabulary=stored.vocabulary,
        scale=stored.head.scale,
        softcap=stored.head.softcap,
    )


def states_in(answers: Answers) -> Raw:
    """The hidden states in an answer; EngineError if the engine left them out."""
    if answers.states is None:
        raise EngineError("the engine gave no hidden states", fix=FAULT)
    return answers.states


def states_dtype(engine: Engine, head: StoredHead) -> str:
    return head.dtype if engine.facts.engine == "table" else engine.facts.dtype


class HeldBaseline:
    """A baseline that holds the states of a few windows in memory."""

    place = None

    def __init__(self, engine: Engine, source: WindowSource, done: Bools) -> None:
        self.head: StoredHead = engine.stored_head()
        self.dtype = states_dtype(engine, self.head)
        answered = engine.score(source, done, Wanted(states=True))
        self._held = {index: states_in(answers) for index, answers in answered}

    def states(self, index: int, window: Window) -> Raw:
        return self._held[index]


def few_windows(plan: Plan) -> Ints:
    """Chooses a few windows that are spread over a plan, to compute them a second time."""
    chosen: Ints = np.arange(0, len(plan), max(1, len(plan) // NOISE_WINDOWS))
    within = np.cumsum(plan.target_counts[chosen]) <= NOISE_TARGETS
    within[0] = True
    return chosen[within]


def noise_floor(
    engine: Engine,
    plan: Plan,
    stored: StoredBaseline | None = None,
    measured: MutableMapping[int, Floats] | None = None,
) -> NoiseFloor:
    """KL of a baseline against itself, computed in a different way, on a few windows spread over the plan.

    ``measured`` has the KL of windows from an attempt that was cut off, and gets that of the others as they come.
    """
    done = np.ones(len(plan), np.bool_)
    done[few_windows(plan)] = False
    engine.measured = measured
    try:
        return engine.noise_floor(stored or HeldBaseline(engine, plan, done), plan, done)
    finally:
        engine.measured = None


def noise_facts(floor: NoiseFloor) -> dict[str, Any]:
    """A noise floor as a manifest keeps it: its KL values, or null if none were measured, and its words."""
    return {"noise_kl": None if floor.kl is None else floor.kl.tolist(), "noise_perturbed": floor.words}
