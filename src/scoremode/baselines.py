"""What a candidate is compared with: a baseline that runs beside it, or one whose hidden states were kept.

model ──score──▶ hidden states of every target, and the head ──▶ reference folder ──▶ StoredBaseline
                                                   └────────────── as they come ──▶ LiveBaseline
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scoremode import runs
from scoremode.corpus import Corpus, specs_of
from scoremode.engines.base import Engine, EngineOptions, NoiseFloor, StoredHead, gather_options
from scoremode.engines.lookup import chosen_settings, engine_name, open_engine
from scoremode.perplexity import Question, ask, identify, score_into
from scoremode.references import Raw, Reference, StatesWriter
from scoremode.scoring import Answered, Progress, check_fits
from scoremode.types import Answers, Bools, Plan, Run, Window, WindowSource

NOISE_WINDOWS, NOISE_TARGETS = 8, 4096  # what the noise floor is measured on, at most


@dataclass(frozen=True, slots=True)
class Side:
    """One model of a comparison, before it is loaded."""

    asked: Question
    engine: str
    options: EngineOptions
    identity: dict[str, Any]
    folder: Path
    cached: bool  # is the folder the cache's, where other processes may ask the same?

    @staticmethod
    def of(
        asked: Question,
        engine: str | None,
        options: EngineOptions,
        folder: Path | None,
        *,
        kind: str = "runs",
        **more: Any,
    ) -> Side:
        """``more`` is part of what makes a stored run this one; ``kind`` is the part of the cache that it lies in."""
        name = engine_name(engine, asked.subject)
        identity = identify(asked, name, {**chosen_settings(asked.subject, name, options), **more})
        place = runs.default_folder(identity, kind) if folder is None else folder
        return Side(asked, name, options, identity, place, folder is None)

    def claimed(self, *, fresh: bool) -> AbstractContextManager[runs.Claim]:
        """The folder of this side's run, held; in the cache, after whoever scores the same."""
        return runs.claimed(self.folder, self.identity, fresh=fresh, waits=self.cached)

    def open(self) -> Engine:
        longest = int(self.asked.plan.lengths.max())
        return open_engine(self.asked.subject, self.engine, self.options, longest=longest)


class LiveBaseline:
    """A baseline that runs beside the candidate: windows are scored as the candidate asks for them.

    Both engines cut a plan into the same batches, so little is kept waiting: what the baseline is ahead, and what was
    asked for last, because a candidate that runs out of memory asks again. ``found`` is told of every answer on the
    way, with the seconds that it took: so the baseline has its own scores without a pass of its own.
    """

    place = None

    def __init__(self, engine: Engine, plan: Plan, found: Callable[[int, Answers, float], None] | None = None) -> None:
        self.engine, self.plan, self._found = engine, plan, found
        self.head: StoredHead = engine.stored_head()  # first: a head that cannot be given is refused before any work
        self.dtype = states_dtype(engine, self.head)
        self._wanted: Bools = np.ones(len(plan), np.bool_)
        self._coming: Iterator[tuple[int, Answers, Raw]] | None = None
        self._held: dict[int, Raw] = {}
        self._given: set[int] = set()

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
            self._held |= {i: raw for i, _, raw in self.engine.score_with_states(self.plan, alone)}
            return
        if self._coming is None:
            self._coming = self.engine.score_with_states(self.plan, ~self._wanted)
        before = time.perf_counter()
        for found, answers, raw in self._coming:
            self._held[found] = raw
            if self._found is not None:
                now = time.perf_counter()
                self._found(found, answers, now - before)
                before = now
            if found == index:
                return
        raise AssertionError("the baseline left a window without states")


class StoredBaseline:
    """A baseline whose states lie in a reference."""

    def __init__(self, stored: Reference, plan: Plan) -> None:
        self.stored, self.plan, self.dtype = stored, plan, stored.dtype
        self.place = (str(stored.folder.resolve()), plan.target_offsets)
        self.head = StoredHead(
            weight=stored.head_weight(),
            bias=stored.head_bias(),
            dtype=stored.head_dtype,
            bias_dtype=stored.bias_dtype or stored.head_dtype,
            vocabulary=stored.vocabulary,
            scale=stored.scale,
            softcap=stored.softcap,
        )

    def states(self, index: int, window: Window) -> Raw:
        return self.stored.rows(int(self.plan.target_offsets[index]), len(window.rows))


def states_dtype(engine: Engine, head: StoredHead) -> str:
    return head.dtype if engine.facts.engine == "table" else engine.facts.dtype


class HeldBaseline:
    """A few windows' states in memory."""

    place = None

    def __init__(self, engine: Engine, source: WindowSource, done: Bools) -> None:
        self.head: StoredHead = engine.stored_head()
        self.dtype = states_dtype(engine, self.head)
        self._held = {index: raw for index, _, raw in engine.score_with_states(source, done)}

    def states(self, index: int, window: Window) -> Raw:
        return self._held[index]


def noise_floor(engine: Engine, plan: Plan, stored: StoredBaseline | None = None) -> NoiseFloor:
    """KL of a baseline against itself, computed otherwise, on a few windows spread over the plan."""
    chosen = np.arange(0, len(plan), max(1, len(plan) // NOISE_WINDOWS))
    within = np.cumsum(plan.target_counts[chosen]) <= NOISE_TARGETS
    within[0] = True
    done = np.ones(len(plan), np.bool_)
    done[chosen[within]] = False
    return engine.noise_floor(stored or HeldBaseline(engine, plan, done), plan, done)


def noise_facts(floor: NoiseFloor) -> dict[str, Any]:
    """As a manifest keeps it: numbers, or null where none were measured, and the words that belong to them."""
    return {"noise_kl": None if floor.kl is None else floor.kl.tolist(), "noise_perturbed": floor.words}


def reference(
    model: str,
    out: str | Path | None = None,
    *,
    engine: str | None = None,
    options: EngineOptions | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **question: Any,
) -> Run:
    """Score a text with a baseline, and keep its final hidden states for later comparisons.

    ``question`` is what :func:`scoremode.perplexity.ask` takes, and by name what EngineOptions has. Without ``out`` the
    reference lies in the cache folder; the run's ``path`` says where.

    >>> reference("table:uniform", "ref", text="any text").perplexity    # doctest: +SKIP
    256 ± ?
    """
    options = gather_options(options, question)
    asked = ask(model, trust_remote_code=bool(options.trust_remote_code), **question)
    side = Side.of(asked, engine, options, None if out is None else Path(out), kind="references", keeps="states")
    with side.claimed(fresh=fresh) as claim:
        if claim.finished is not None:
            Reference.open(side.folder)  # refuses files that were cut or edited since
            return claim.finished
        with closing(side.open()) as worker:
            return _keep(side, worker, claim, _repeatable(question), progress)


def _keep(
    side: Side, worker: Engine, claim: runs.Claim, question: dict[str, Any] | None, progress: Progress | None
) -> Run:
    head, plan = worker.stored_head(), side.asked.plan
    width, dtype = head.weight.shape[1], states_dtype(worker, head)
    check_fits(plan, worker.facts.vocabulary, worker.facts.context_length)
    claim.begin()
    with StatesWriter(side.folder, targets=plan.targets, width=width, dtype=dtype, identity=side.identity) as writer:

        def complete(manifest: dict[str, Any]) -> None:
            writer.write_head(
                head.weight, head.bias, scale=head.scale, softcap=head.softcap, vocabulary=head.vocabulary
            )
            names = ("plan_digest", "method", "method_settings", "model_fingerprint", "tokenizer")
            facts = {name: manifest[name] for name in (*names, "corpus", "corpus_sha256")}
            engine = {name: manifest[name] for name in ("engine", "dtype", "device", "head")}
            stored = StoredBaseline(writer.finish({**facts, "engine": engine}), plan)
            manifest.update(noise_facts(noise_floor(worker, plan, stored)))

        return score_into(
            side.asked,
            worker,
            claim,
            progress,
            answered=partial(_keeping, writer),
            more={"question": question},
            before_saving=complete,
            kept=writer.windows_in(plan.target_offsets),  # a journal may know windows whose states a kill cut short
        )


def _keeping(writer: StatesWriter, engine: Engine, plan: Plan, done: Bools) -> Answered:
    for index, answers, states in engine.score_with_states(plan, done):
        writer.write(int(plan.target_offsets[index]), states)
        writer.flush()
        yield index, answers, None


def _repeatable(question: dict[str, Any]) -> dict[str, Any] | None:
    """What was asked, where it can be asked again from names and files; None for a text that was piped in."""
    corpus = question.get("corpus")
    if isinstance(corpus, Corpus) or "-" in specs_of(corpus):
        return None
    named = {} if corpus is None else {"corpus": specs_of(corpus)}
    return {name: value for name, value in question.items() if value is not None and value is not False} | named
