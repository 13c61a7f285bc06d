"""One replica: an engine inside a Ray actor. What it says is data; an error of the engine never ends the actor."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from scoremode import __version__
from scoremode.cluster.transport import OpenBaselines, Outline, Parcel, PlacedBaseline, PlacedWant, Refusal
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
BLOCKS_PER_SECOND = 200  # that one driver should have to take, at most: each costs it a millisecond or two


def block_seconds(replicas: int) -> float:
    """How old a block may grow: with very many replicas longer, because the driver takes every block itself.

    >>> block_seconds(8), block_seconds(1000)
    (0.5, 5.0)
    """
    return max(BLOCK_SECONDS, replicas / BLOCKS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a replica opens, and what the driver knows of it: a node that has anything else is left out."""

    model: str
    engine: str
    options: Mapping[str, Any]
    tokenizer: str | None
    work: Work
    folder: str  # where the driver runs: relative paths start there
    fingerprint: str
    vocabulary_of: str  # the tokenizer's fingerprint
    settings: str  # as JSON
    versions: Mapping[str, str]

    @staticmethod
    def of(chosen: Chosen, tokenizer: str | None, work: Work) -> Spec:
        return Spec(
            model=chosen.subject.name,
            engine=chosen.plugin.called,
            options=chosen.options.given(),
            tokenizer=tokenizer,
            work=work,
            folder=os.getcwd(),
            fingerprint=chosen.subject.fingerprint,
            vocabulary_of=chosen.subject.tokenizer.facts.fingerprint,
            settings=_as_json(chosen.settings()),
            versions=versions_here(chosen.plugin),
        )


def _as_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(without_secrets(dict(settings)), sort_keys=True, default=str)


def versions_here(plugin: EnginePlugin) -> dict[str, str]:
    """Of scoremode and of the libraries that an engine's numbers come from."""
    found = {"scoremode": __version__}
    for package in plugin.packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica that is ready."""

    facts: EngineFacts
    longest: int | None
    host: str
    node: str  # Ray's name of it
    pid: int
    seconds: float  # to open the engine


@dataclass(frozen=True, slots=True)
class Finished:
    """The last word of a lease."""

    seconds: float


class Replica:
    """An engine that answers leases. Ray makes an actor of it."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._baselines = OpenBaselines()

    def where(self) -> str:
        """The host; answered as soon as there is a process."""
        return socket.gethostname()

    def open(self, spec: Spec) -> Opened | Refusal:
        began = time.perf_counter()
        try:
            if os.path.isdir(spec.folder):
                os.chdir(spec.folder)
            chosen = choose(spec.model, spec.engine, spec.options, spec.tokenizer)
            _require_same(spec, chosen)
            self._engine = open_engine(chosen, spec.work)
        except Exception as error:
            return Refusal.of(error)
        seconds = time.perf_counter() - began
        facts, longest = self._engine.facts, self._engine.longest
        return Opened(facts, longest, socket.gethostname(), _node(), os.getpid(), seconds)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "open comes first"
        return self._engine

    def batches(self, source: Parcel | Outline) -> list[Ints] | Refusal | None:
        """Which windows share a batch, by the engine's own rule."""
        try:
            return self.engine.batches(source)
        except Exception as error:
            return Refusal.of(error)

    def score(
        self, parcel: Parcel, done: Bools, asked: PlacedWant, oldest: float = BLOCK_SECONDS
    ) -> Iterator[PackedAnswers | Finished | Refusal]:
        """Answers of a lease, a few megabytes at a time, and a last word."""
        began = sent = time.perf_counter()
        waiting = AnswerPacker(self.engine.facts.schema)
        try:
            want = self._baselines.want(asked, parcel)
            for window, answers in self.engine.score(parcel, done, want):
                # what cannot travel in columns is a fault of the engine, in the words that the driver would use
                check_shapes(waiting.schema, parcel.window(window).targets.shape, int(parcel.indices[window]), answers)
                if not waiting.fits(answers):
                    yield waiting.take()
                waiting.add(window, answers)
                if waiting.size >= BLOCK_BYTES or time.perf_counter() - sent >= oldest:
                    yield waiting.take()
                    sent = time.perf_counter()
        except Exception as error:
            if waiting.found:
                yield waiting.take()
            yield Refusal.of(error)
            return
        if waiting.found:
            yield waiting.take()
        yield Finished(time.perf_counter() - began)

    def probe(self, parcel: Parcel) -> Floats | Refusal:
        """The log-probabilities of one window."""
        try:
            ((_, answers),) = self.engine.score(parcel, np.zeros(len(parcel), np.bool_))
            return answers.logprob
        except Exception as error:
            return Refusal.of(error)

    def facts(self) -> EngineFacts:
        """They may change: an engine checks the kernel of divergences when the first one is asked for."""
        return self.engine.facts

    def stored_head(self) -> StoredHead | Refusal:
        try:
            return self.engine.stored_head()
        except Exception as error:
            return Refusal.of(error)

    def noise_floor(self, place: PlacedBaseline | None, parcel: Parcel, done: Bools) -> NoiseFloor | Refusal:
        """Against a baseline; None: against states that this replica computes now, because none can be read here."""
        try:
            if place is None:
                baseline: Any = HeldBaseline(self.engine, parcel, done)
            else:
                baseline = self._baselines.baseline(place, parcel)
            return self.engine.noise_floor(baseline, parcel, done)
        except Exception as error:
            return Refusal.of(error)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _node() -> str:
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found


def _require_same(spec: Spec, chosen: Chosen) -> None:
    """Refuse a node that has other weights, another tokenizer, other libraries or other settings than the driver."""
    host = platform.node()
    if chosen.subject.fingerprint != spec.fingerprint:
        raise EngineError(f"{host} has other weights in {spec.model}", fix="give every node the same files")
    if chosen.subject.tokenizer.facts.fingerprint != spec.vocabulary_of:
        raise EngineError(f"{host} has another tokenizer for {spec.model}", fix="give every node the same files")
    here = versions_here(chosen.plugin)
    for name in sorted({*here, *spec.versions}):
        if here.get(name) != spec.versions.get(name):
            raise EngineError(
                f"{host} has {name} {here.get(name)} and the driver {spec.versions.get(name)}",
                fix="install the same version everywhere",
            )
    settings = _as_json(chosen.settings())
    if settings != spec.settings:
        raise EngineError(
            f"the engine on {host} would be set up in another way: {_difference(spec.settings, settings)}",
            fix="give the options that both can use, as in --device cpu",
        )


def _difference(driver: str, here: str) -> str:
    one, other = json.loads(driver), json.loads(here)
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    return ", ".join(f"{name} {other.get(name)} instead of {one.get(name)}" for name in names[:3])
