"""Baselines with hidden states, and their noise floor.

model ──score──▶ hidden states of every target, and the head ──▶ reference folder ──▶ stored_states
model without such a head ──▶ its logits, as they come: LiveLogits, in logits.py; LiveSteps, in steps.py
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np

from scoremode.core.engine.base import Engine, FinalStates, NoiseFloor, StoredHead, Wanted
from scoremode.core.plan.plan import Plan
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import FAULT, Answers, Window, WindowSource
from scoremode.errors import EngineError
from scoremode.values import Bools, Floats, Ints, Raw

NOISE_WINDOWS = 8  # of the noise floor: at least so many if the plan has them, and fewer than twice as many
NOISE_TARGETS = 4096  # of the noise floor, at most, unless the first window has more


def stored_states(stored: Reference, offsets: Ints) -> FinalStates:
    """A baseline whose states lie in a reference; ``offsets`` say where the targets of each window begin in it."""

    def states(index: int, window: Window) -> Raw:
        return stored.rows(int(offsets[index]), len(window.rows))

    return FinalStates(head_of(stored), stored.dtype, states, stored, offsets)


def held_states(engine: Engine, source: WindowSource, done: Bools) -> FinalStates:
    """A baseline of the windows that are not ``done``, whose states are computed now and held in memory."""
    head = engine.stored_head()
    held = {index: states_in(answers) for index, answers in engine.score(source, done, Wanted(states=True))}
    return FinalStates(head, states_dtype(engine, head), lambda index, _: held[index])


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


def few_windows(plan: Plan) -> Ints:
    """Chooses a few windows that are spread over a plan, to compute them a second time."""
    chosen: Ints = np.arange(0, len(plan), max(1, len(plan) // NOISE_WINDOWS))
    within = np.cumsum(plan.target_counts[chosen]) <= NOISE_TARGETS
    within[0] = True
    return chosen[within]


def noise_floor(
    engine: Engine,
    plan: Plan,
    stored: FinalStates | None = None,
    measured: MutableMapping[int, Floats] | None = None,
) -> NoiseFloor:
    """KL of a baseline against itself, computed in a different way, on a few windows spread over the plan.

    ``measured`` has the KL of windows from an attempt that was cut off, and gets that of the others as they come.
    """
    done = np.ones(len(plan), np.bool_)
    done[few_windows(plan)] = False
    engine.measured = measured
    try:
        return engine.noise_floor(stored or held_states(engine, plan, done), plan, done)
    finally:
        engine.measured = None


def noise_facts(floor: NoiseFloor) -> dict[str, Any]:
    """A noise floor as a manifest keeps it: its KL values, or null if none were measured, and its words."""
    return {"noise_kl": None if floor.kl is None else floor.kl.tolist(), "noise_perturbed": floor.words}
