"""One replica: a Ray actor that opens a worker on its node, and calls its methods by name.

The worker of most replicas scores: windows in, answers out, a few megabytes at a time.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scoremode.core.disk.manifests import without_secrets
from scoremode.core.engine.base import Engine, EngineFacts, NoiseFloor, StoredDistributions, Wanted
from scoremode.core.engine.baseline import HeldBaseline, StoredBaseline
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import ChosenEngine, choose, open_engine
from scoremode.core.installation import installed_versions
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import check_shapes
from scoremode.core.scores.packing import AnswerPacker, PackedAnswers
from scoremode.core.verbs.replicas import OTHER_FILES, OpenWorker, Worker
from scoremode.errors import EngineError, ScoremodeError
from scoremode.remote.ray.room import NOT_OPEN
from scoremode.remote.ray.sent import SentBaseline, WindowSubset
from scoremode.values import Bools, Floats
from scoremode.version import __version__

BLOCK_BYTES, BLOCK_SECONDS = 4 << 20, 0.5  # a block is sent when it is this large or this old
BLOCKS_PER_SECOND = 200  # that one driver should have to read, at most: each costs it a millisecond or two


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica opens, and what it must find on its node: a node with other files or libraries is left out."""

    model: str
    engine: str
    options: Mapping[str, Any]
    tokenizer: str | None
    work: Work
    folder: str  # where the driver runs: relative paths start there
    facts: Mapping[str, str]  # of the driver, see ``facts_of``
    open_worker: OpenWorker

    def require_same(self, chosen: ChosenEngine) -> None:
        """Refuses a node that has other weights, another tokenizer, other libraries or other settings."""
        here = facts_of(chosen)
        names = [name for name in {**self.facts, **here} if here.get(name) != self.facts.get(name)]
        if names:
            host, words = socket.gethostname(), ", ".join(names[:3])
            values = f" ({here.get(names[0])} instead of {self.facts.get(names[0])})" if len(names) == 1 else ""
            raise EngineError(f"{host} has other {words} for {self.model}{values}", fix=OTHER_FILES)


def facts_of(chosen: ChosenEngine) -> dict[str, str]:
    """What must be the same on every node: weights, tokenizer, versions of libraries, and settings of the engine."""
    subject, settings = chosen.subject, without_secrets(dict(chosen.settings()))
    found = {"weights": subject.fingerprint, "tokenizer": subject.tokenizer.facts.fingerprint}
    versions = {"scoremode": __version__, **installed_versions(chosen.plugin.packages)}
    found |= {f"version of {name}": version for name, version in versions.items()}
    return found | {
        f"setting {name}": json.dumps(value, default=str, sort_keys=True) for name, value in settings.items()
    }


@dataclass(frozen=True, slots=True)
class Opened:
    """What a replica reports when its worker is open."""

    facts: EngineFacts
    about: Any  # of the worker
    host: str
    pid: int
    seconds: float  # to open the worker


@dataclass(frozen=True, slots=True)
class Finished:
    """The last item that a replica sends for a piece of work."""

    seconds: float


def as_our_error(error: Exception) -> ScoremodeError:
    """Converts an error to a class in errors.py, because other classes may not exist in the driver's process."""
    if isinstance(error, ScoremodeError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == ScoremodeError.__module__)
        found: ScoremodeError = kind(error.message, fix=error.fix)
        return found
    words = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return EngineError(f"the engine failed ({words})", fix="run the same command again to resume")


class Replica:
    """A worker that does pieces of work. Ray makes an actor of this class. Errors are returned instead of raised."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._worker: Any = None  # not open, also after Ray has started the replica again

    def is_up(self) -> None:
        """Returns as soon as the actor has a process."""

    def open(self) -> Opened | ScoremodeError:
        began, spec = time.perf_counter(), self._spec
        if os.path.isdir(spec.folder):
            os.chdir(spec.folder)
        try:
            chosen = choose(spec.model, spec.engine, spec.options, spec.tokenizer)
            spec.require_same(chosen)
            worker = spec.open_worker(chosen, spec.work)
        except Exception as error:
            return as_our_error(error)
        self._worker = worker.methods
        return Opened(worker.facts, worker.about, socket.gethostname(), os.getpid(), time.perf_counter() - began)

    def _method(self, name: str) -> Any:
        if self._worker is None:
            raise RuntimeError(NOT_OPEN)  # for the driver the same as a death
        return getattr(self._worker, name)

    def call(self, name: str, *arguments: Any) -> Any:
        method = self._method(name)
        try:
            return method(*arguments)
        except Exception as error:
            return as_our_error(error)

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        """Yields what a method yields; then ``Finished`` or an error."""
        began, method = time.perf_counter(), self._method(name)
        try:
            yield from method(*arguments)
        except Exception as error:
            yield as_our_error(error)
        else:
            yield Finished(time.perf_counter() - began)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def block_seconds(replicas: int) -> float:
    """Seconds after which a block is sent: more with very many replicas, because one driver reads every block.

    >>> block_seconds(8), block_seconds(1000)
    (0.5, 5.0)
    """
    return max(BLOCK_SECONDS, replicas / BLOCKS_PER_SECOND)


def open_scoring(chosen: ChosenEngine, work: Work) -> Worker:
    engine = open_engine(chosen, work)
    return Worker(ScoringWorker(engine), engine.facts, engine.longest)


class ScoringWorker:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.close = engine, engine.close
        self.batches, self.stored_head = engine.batches, engine.stored_head
        self._opened: dict[str, Reference | StoredDistributions] = {}  # baselines, so that each is checked once

    def facts(self) -> EngineFacts:
        """The engine's current facts. They may change: the kernel of divergences is checked when it is first used."""
        return self.engine.facts

    def score(
        self, subset: WindowSubset, done: Bools, want: Wanted, against: SentBaseline | None, oldest: float
    ) -> Iterator[PackedAnswers]:
        """Yields the answers of a piece in blocks, none of which waits for more than ``oldest`` seconds."""
        if against is not None:
            want = replace(want, against=self._baseline(against, subset))
        sent, waiting = time.perf_counter(), AnswerPacker()
        try:
            for window, answers in self.engine.score(subset, done, want):
                # answers that do not fit into columns are a fault of the engine, in the words of the driver's own check
                check_shapes(subset.window(window).targets.shape, int(subset.indices[window]), answers)
                if not waiting.fits(answers):
                    yield waiting.take()
                waiting.add(window, answers)
                if waiting.size >= BLOCK_BYTES or time.perf_counter() - sent >= oldest:
                    yield waiting.take()
                    sent = time.perf_counter()
        except Exception:
            if waiting.found:
                yield waiting.take()
            raise
        if waiting.found:
            yield waiting.take()

    def _baseline(self, sent: SentBaseline, subset: WindowSubset) -> StoredBaseline | StoredDistributions:
        if sent.path not in self._opened:
            self._opened[sent.path] = sent.open()
        found = self._opened[sent.path]
        if not isinstance(found, Reference):
            return found.part(subset.indices)
        assert subset.target_offsets is not None, "a plan knows where the targets of a window begin"
        return StoredBaseline(found, offsets=subset.target_offsets)

    def probe(self, subset: WindowSubset) -> Iterator[Floats]:
        """Yields the scores of one window, to see whether all replicas agree."""
        ((_, answers),) = self.engine.score(subset, np.zeros(len(subset), np.bool_))
        yield answers.logprob

    def noise_floor(self, subset: WindowSubset, done: Bools) -> NoiseFloor:
        """The noise floor against states that this replica computes now, in the batches of the run."""
        return self.engine.noise_floor(HeldBaseline(self.engine, subset, done), subset, done)
