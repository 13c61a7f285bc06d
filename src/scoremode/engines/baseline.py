"""What a candidate is compared with: a baseline that runs at the same time, or one whose hidden states were kept.

model ──score──▶ hidden states of every target, and the head ──▶ reference folder ──▶ StoredBaseline
                                                   └────────────── as they come ──▶ LiveBaseline
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from scoremode.engines.base import Engine, NoiseFloor, StoredHead, Want
from scoremode.errors import EngineError
from scoremode.plan.plan import Plan
from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.references.reader import Reference
from scoremode.values import Bools, Ints, Raw

NOISE_WINDOWS, NOISE_TARGETS = 8, 4096  # what the noise floor is measured on, at most


class LiveBaseline:
    """A baseline that runs at the same time as the candidate: windows are scored when the candidate asks for them.

    Both engines cut a plan into the same batches, so little is kept waiting: what the baseline is ahead, and what was
    asked for last, because a candidate that runs out of memory asks again. With ``keeps_answers``, the baseline's own
    scores are kept on the way until ``take_answers``: so it has them without a pass of its own.
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
        """The windows that will be asked for; no others are computed or kept."""
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
            self._coming = self.engine.score(self.plan, ~self._wanted, Want(states=True))
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


class StoredBaseline:
    """A baseline whose states lie in a reference; ``offsets`` say where the targets of each window begin in it."""

    def __init__(self, stored: Reference, plan: Plan | None = None, *, offsets: Ints | None = None) -> None:
        assert (plan is None) != (offsets is None), "a plan has its own offsets"
        self.offsets: Ints = offsets if plan is None else plan.target_offsets  # type: ignore[assignment]
        self.stored, self.dtype = stored, stored.dtype
        # a reference that is not all here cannot be opened by others
        self.place = (str(stored.folder.resolve()), self.offsets) if stored.remote is None else None
        self.head = StoredHead(
            weight=stored.head_weight(),
            bias=stored.head_bias(),
            dtype=stored.head.dtype,
            bias_dtype=stored.head.bias_dtype or stored.head.dtype,
            vocabulary=stored.vocabulary,
            scale=stored.head.scale,
            softcap=stored.head.softcap,
        )

    def states(self, index: int, window: Window) -> Raw:
        return self.stored.rows(int(self.offsets[index]), len(window.rows))


def states_in(answers: Answers) -> Raw:
    """The hidden states of an answer for which they were wanted."""
    if answers.states is None:
        raise EngineError("the engine gave no hidden states", fix="this is a fault of the engine")
    return answers.states


def _states_of(engine: Engine, source: WindowSource, done: Bools) -> dict[int, Raw]:
    return {index: states_in(answers) for index, answers in engine.score(source, done, Want(states=True))}


def states_dtype(engine: Engine, head: StoredHead) -> str:
    return head.dtype if engine.facts.engine == "table" else engine.facts.dtype


class HeldBaseline:
    """A few windows' states in memory."""

    place = None

    def __init__(self, engine: Engine, source: WindowSource, done: Bools) -> None:
        self.head: StoredHead = engine.stored_head()
        self.dtype = states_dtype(engine, self.head)
        self._held = _states_of(engine, source, done)

    def states(self, index: int, window: Window) -> Raw:
        return self._held[index]


def noise_floor(engine: Engine, plan: Plan, stored: StoredBaseline | None = None) -> NoiseFloor:
    """KL of a baseline against itself, computed in a different way, on a few windows spread over the plan."""
    chosen = np.arange(0, len(plan), max(1, len(plan) // NOISE_WINDOWS))
    within = np.cumsum(plan.target_counts[chosen]) <= NOISE_TARGETS
    within[0] = True
    done = np.ones(len(plan), np.bool_)
    done[chosen[within]] = False
    return engine.noise_floor(stored or HeldBaseline(engine, plan, done), plan, done)


def noise_facts(floor: NoiseFloor) -> dict[str, Any]:
    """As a manifest keeps it: numbers, or null if none were measured, and the words that belong to them."""
    return {"noise_kl": None if floor.kl is None else floor.kl.tolist(), "noise_perturbed": floor.words}
