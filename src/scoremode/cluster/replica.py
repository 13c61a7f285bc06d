"""One replica: an engine inside a Ray actor. Its methods return errors as data: they never end the actor."""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from scoremode import __version__
from scoremode.cluster.transport import OpenBaselines, Refusal, SentBaseline, SentWant, WindowLengths, WindowSubset
from scoremode.disk.manifests import without_secrets
from scoremode.engines.base import Engine, EngineFacts, NoiseFloor, StoredHead
from scoremode.engines.baseline import HeldBaseline
from scoremode.engines.plugin import EnginePlugin, Work
from scoremode.engines.registry import Chosen, choose, open_engine
from scoremode.errors import EngineError
from scoremode.scores.answers import check_shapes
from scoremode.scores.packing import AnswerPacker, PackedAnswers
from scoremode.values import Bools, Floats, Ints

BLOCK_BYTES, BLOCK_SECONDS = 4 << 20, 0.5  # a block is sent when it is this large or this old
BLOCKS_PER_SECOND = 200  # that one driver should have to read, at most: each costs it a millisecond or two
OTHER_FILES, OTHER_VERSION = "give every node the same files", "install the same version everywhere"

P = ParamSpec("P")
T = TypeVar("T")


def block_seconds(replicas: int) -> float:
    """How old a block may grow: older with very many replicas, because one driver reads every block.

    >>> block_seconds(8), block_seconds(1000)
    (0.5, 5.0)
    """
    return max(BLOCK_SECONDS, replicas / BLOCKS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica opens, and what it must find on its node: a node with other files or libraries is left out."""

    model: str
    engine: str
    options: Mapping[str, Any]
    tokenizer: str | None
    work: Work
    folder: str  # where the driver runs: relative paths start there
    fingerprint: str
    tokenizer_fingerprint: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]

    @staticmethod
    def of(chosen: Chosen, tokenizer: str | None, work: Work) -> ReplicaSpec:
        return ReplicaSpec(
            model=chosen.subject.name,
            engine=chosen.plugin.called,
            options=chosen.options.given(),
            tokenizer=tokenizer,
            work=work,
            folder=os.getcwd(),
            fingerprint=chosen.subject.fingerprint,
            tokenizer_fingerprint=chosen.subject.tokenizer.facts.fingerprint,
            settings=_plain_settings(chosen),
            versions=_versions(chosen.plugin),
        )

    def require_same(self, chosen: Chosen) -> None:
        """Refuses a node that has other weights, another tokenizer, other libraries or other settings."""
        host = socket.gethostname()
        if chosen.subject.fingerprint != self.fingerprint:
            raise EngineError(f"{host} has other weights in {self.model}", fix=OTHER_FILES)
        if chosen.subject.tokenizer.facts.fingerprint != self.tokenizer_fingerprint:
            raise EngineError(f"{host} has another tokenizer for {self.model}", fix=OTHER_FILES)
        versions, settings = _versions(chosen.plugin), _plain_settings(chosen)
        for name in _differing(versions, self.versions):
            raise EngineError(
                f"{host} has {name} {versions.get(name)} and the driver {self.versions.get(name)}", fix=OTHER_VERSION
            )
        names = _differing(settings, self.settings)[:3]
        if names:
            differences = [f"{name} {settings.get(name)} instead of {self.settings.get(name)}" for name in names]
            raise EngineError(
                f"the engine on {host} would be set up in another way: {', '.join(differences)}",
                fix="give the options that both can use, as in --device cpu",
            )


def _plain_settings(chosen: Chosen) -> dict[str, Any]:
    """The settings of an engine as JSON gives them back, so that those of two machines can be compared."""
    found: dict[str, Any] = json.loads(json.dumps(without_secrets(dict(chosen.settings())), default=str))
    return found


def _versions(plugin: EnginePlugin) -> dict[str, str]:
    """Versions of scoremode and of the libraries that the engine's numbers come from."""
    found = {"scoremode": __version__}
    for package in plugin.packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica that is ready."""

    facts: EngineFacts
    longest: int | None
    host: str
    node: str  # its id in Ray
    pid: int
    seconds: float  # to open the engine


@dataclass(frozen=True, slots=True)
class Finished:
    """The last item of an assignment."""

    seconds: float


def _returns_errors(
    method: Callable[Concatenate[Replica, P], T],
) -> Callable[Concatenate[Replica, P], T | Refusal]:
    """Lets a method return its error as a ``Refusal``."""

    @functools.wraps(method)
    def safe(self: Replica, /, *arguments: P.args, **named: P.kwargs) -> T | Refusal:
        try:
            return method(self, *arguments, **named)
        except Exception as error:
            return Refusal.of(error)

    return safe


class Replica:
    """An engine that scores assignments. Ray makes an actor of this class."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._baselines = OpenBaselines()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "open comes first"
        return self._engine

    def where(self) -> str:
        """The host; answered as soon as the actor has a process."""
        return socket.gethostname()

    @_returns_errors
    def open(self, spec: ReplicaSpec) -> Opened:
        import ray

        began = time.perf_counter()
        if os.path.isdir(spec.folder):
            os.chdir(spec.folder)
        chosen = choose(spec.model, spec.engine, spec.options, spec.tokenizer)
        spec.require_same(chosen)
        self._engine = open_engine(chosen, spec.work)
        seconds, node = time.perf_counter() - began, ray.get_runtime_context().get_node_id()
        return Opened(self.engine.facts, self.engine.longest, socket.gethostname(), node, os.getpid(), seconds)

    @_returns_errors
    def batches(self, source: WindowSubset | WindowLengths) -> list[Ints] | None:
        """Which windows share a batch, by the engine's own rule."""
        return self.engine.batches(source)

    def score(
        self, subset: WindowSubset, done: Bools, asked: SentWant, oldest: float = BLOCK_SECONDS
    ) -> Iterator[PackedAnswers | Finished | Refusal]:
        """Answers of an assignment, a few megabytes at a time; then ``Finished`` or an error."""
        began = sent = time.perf_counter()
        waiting = AnswerPacker(self.engine.facts.schema)
        refusal: Refusal | None = None
        try:
            want = self._baselines.want(asked, subset)
            for window, answers in self.engine.score(subset, done, want):
                # answers that do not fit into columns are a fault of the engine, in the words of the driver's own check
                check_shapes(waiting.schema, subset.window(window).targets.shape, int(subset.indices[window]), answers)
                if not waiting.fits(answers):
                    yield waiting.take()
                waiting.add(window, answers)
                if waiting.size >= BLOCK_BYTES or time.perf_counter() - sent >= oldest:
                    yield waiting.take()
                    sent = time.perf_counter()
        except Exception as error:
            refusal = Refusal.of(error)
        if waiting.found:
            yield waiting.take()
        yield refusal or Finished(time.perf_counter() - began)

    @_returns_errors
    def probe(self, subset: WindowSubset) -> Floats:
        """The log-probabilities of one window."""
        ((_, answers),) = self.engine.score(subset, np.zeros(len(subset), np.bool_))
        return answers.logprob

    def facts(self) -> EngineFacts:
        """Facts may change: an engine checks the kernel of divergences when the first one is requested."""
        return self.engine.facts

    @_returns_errors
    def stored_head(self) -> StoredHead:
        return self.engine.stored_head()

    @_returns_errors
    def noise_floor(self, place: SentBaseline | None, subset: WindowSubset, done: Bools) -> NoiseFloor:
        """Against a baseline; None: against states that this replica computes now, because it can read no others."""
        if place is None:
            baseline: Any = HeldBaseline(self.engine, subset, done)
        else:
            baseline = self._baselines.baseline(place, subset)
        return self.engine.noise_floor(baseline, subset, done)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
