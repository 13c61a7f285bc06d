"""Baselines that a candidate is compared with: models that run at the same time, and references.

model ──score──▶ hidden states of every target, and the head ──▶ reference folder ──▶ StoredBaseline
                                                   └────────────── as they come ──▶ LiveBaseline
model without such a head ──▶ its logits, as they come: LiveLogits, in logits.py; LiveSteps, in steps.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from scoremode.core.engine.base import Engine, NoiseFloor, StoredHead, Wanted
from scoremode.core.plan.plan import Plan
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import FAULT, Answers, Window, WindowSource
from scoremode.errors import EngineError
from scoremode.values import Bools, Ints, Raw

if TYPE_CHECKING:
    from scoremode.core.engine.logits import LiveLogits

NOISE_WINDOWS = 8  # of the noise floor: at least so many if the plan has them, and fewer than twice as many
NOISE_TARGETS = 4096  # of the noise floor, at most, unless the first window has more


class LiveBaseline:
    """A baseline that runs at the same time as the candidate: windows are scored when the candidate asks for them.

    Both engines cut a plan into the same batches, so few states are held: those that the candidate has not asked for
    yet, and the last that it asked for, because a candidate that runs out of memory asks again. With
    ``keeps_answers``, the baseline's own scores are kept until ``take_answers``, so they need no second pass.
    """

    place = None

    def __init__(self, engine: Engine, plan: Plan, *, keeps_answers: bool = False) -> None:
        self.engine, self.plan, self.keeps_answers = engine, plan, keeps_answers
        self.head: StoredHead = engine.stored_head()  # first: a head that cannot be given is refused before any work
        self.dtype = states_dtype(engine, self.head)
        self._wanted: Bools = np.ones(len(plan), np.bool_)
        self._coming: Iterator[tuple[int, Answers]] | None = None
        self._held: dict[int, Raw] = {}
        self._given: set[int] = set()
        self._answers: list[tuple[int, Answers, float]] = []

    def take_answers(self) -> list[tuple[int, Answers, float]]:
        """Windows that were answered since the last call: the index, the answers, and the seconds that they took."""
        found, self._answers = self._answers, []
        return found

    def want(self, wanted: Bools) -> None:
        """Announce the windows that will be asked for; no others are computed or kept."""
        self._wanted, self._coming = wanted, None
        self._held.clear()
        self._given.clear()

    def states(self, index: int, window: Window) -> Raw:
        if index not in self._held:
            for given in self._given & self._held.keys():
                del self._held[given]
            self._advance_to(index)
        self._given.add(index)
        raw = self._held[index]
        assert len(raw) == len(window.rows), "a state for each row"
        return raw

    def _advance_to(self, index: int) -> None:
        if index in self._given or not self._wanted[index]:  # again, long after: only its own batch is computed
            alone = np.ones(len(self.plan), np.bool_)
            alone[index] = False
            self._held |= _states_of(self.engine, self.plan, alone)
            return
        if self._coming is None:
            self._coming = self.engine.score(self.plan, ~self._wanted, Wanted(states=True))
        before = time.perf_counter()
        for found, answers in self._coming:
            self._held[found] = states_in(answers)
            if self.keeps_answers:
                now = time.perf_counter()
                self._answers.append((found, answers, now - before))
                before = now
            if found == index:
                return
        raise AssertionError("the baseline left a window without states")


def live_baseline(engine: Engine, plan: Plan, *, by_logits: bool, keeps_answers: bool) -> LiveBaseline | LiveLogits:
    """Makes a live baseline of an open engine: by its logits, or by its hidden states and its head."""
    if not by_logits:
        return LiveBaseline(engine, plan, keeps_answers=keeps_answers)
    from scoremode.core.engine.logits import LiveLogits
    from scoremode.core.engine.steps import LiveSteps

    return (LiveLogits if engine.path is None else LiveSteps)(engine, plan, keeps_answers=keeps_answers)


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


def _states_of(engine: Engine, source: WindowSource, done: Bools) -> dict[int, Raw]:
    return {index: states_in(answers) for index, answers in engine.score(source, done, Wanted(states=True))}


def states_dtype(engine: Engine, head: StoredHead) -> str:
    return head.dtype if engine.facts.engine == "table" else engine.facts.dtype


class HeldBaseline:
    """A baseline that holds the states of a few windows in memory."""

    place = None

    def __init__(self, engine: Engine, source: WindowSource, done: Bools) -> None:
        self.head: StoredHead = engine.stored_head()
        self.dtype = states_dtype(engine, self.head)
        self._held = _states_of(engine, source, done)

    def states(self, index: int, window: Window) -> Raw:
        return self._held[index]


def few_windows(plan: Plan) -> Ints:
    """Chooses a few windows that are spread over a plan, to compute them a second time."""
    chosen: Ints = np.arange(0, len(plan), max(1, len(plan) // NOISE_WINDOWS))
    within = np.cumsum(plan.target_counts[chosen]) <= NOISE_TARGETS
    within[0] = True
    return chosen[within]


def noise_floor(engine: Engine, plan: Plan, stored: StoredBaseline | None = None) -> NoiseFloor:
    """KL of a baseline against itself, computed in a different way, on a few windows spread over the plan."""
    done = np.ones(len(plan), np.bool_)
    done[few_windows(plan)] = False
    return engine.noise_floor(stored or HeldBaseline(engine, plan, done), plan, done)


def noise_facts(floor: NoiseFloor) -> dict[str, Any]:
    """A noise floor as a manifest keeps it: its KL values, or null if none were measured, and its words."""
    return {"noise_kl": None if floor.kl is None else floor.kl.tolist(), "noise_perturbed": floor.words}
