"""One replica: an engine inside a Ray actor, and the windows and baselines that are sent to it.

Answers come back as ``scores.packing.PackedAnswers``. Methods return errors instead of raising them.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from scoremode import __version__
from scoremode.core.disk.files import remembered_sha256
from scoremode.core.disk.folders import cache_folder
from scoremode.core.disk.manifests import without_secrets
from scoremode.core.engine.base import Baseline, Engine, EngineFacts, NoiseFloor, StoredHead, Want, WholeDistributions
from scoremode.core.engine.baseline import HeldBaseline, StoredBaseline
from scoremode.core.engine.plugin import EnginePlugin, Work
from scoremode.core.engine.registry import Chosen, choose, open_engine
from scoremode.core.installation import installed_versions
from scoremode.core.plan.plan import Plan
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import Window, WindowSource, check_shapes
from scoremode.core.scores.packing import AnswerPacker, PackedAnswers, PackedWindows
from scoremode.errors import EngineError, RunError, ScoremodeError
from scoremode.remote.storage.open_copies import open_reference
from scoremode.remote.storage.uri import Place
from scoremode.studies.attribution.swapping import Swap, SwapColumns, SwapFacts, Swapper
from scoremode.studies.attribution.weights import candidate_fingerprint
from scoremode.studies.kld.file import FileBaseline, KldFile
from scoremode.studies.rollouts.writing import DrawingRules, Writer, WritingRequest, WrittenTokens
from scoremode.values import Bools, Floats, Ints

BLOCK_BYTES, BLOCK_SECONDS = 4 << 20, 0.5  # a block is sent when it is this large or this old
BLOCKS_PER_SECOND = 200  # that one driver should have to read, at most: each costs it a millisecond or two
OTHER_FILES, OTHER_VERSION = "give every node the same files", "install the same version everywhere"
SHARED = "put it on storage that every node sees under this path"

P = ParamSpec("P")
T = TypeVar("T")


def block_seconds(replicas: int) -> float:
    """Seconds after which a block is sent: more with very many replicas, because one driver reads every block.

    >>> block_seconds(8), block_seconds(1000)
    (0.5, 5.0)
    """
    return max(BLOCK_SECONDS, replicas / BLOCKS_PER_SECOND)


# ── what is sent to a replica ─────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class WindowSubset:
    """Some windows of a source, as a source of its own that also knows which of them share a batch."""

    indices: Ints  # (windows,) in the source that they come from
    windows: PackedWindows
    batch_ends: Ints | None  # (batches,) windows before the end of each; None: engines find batches by their own rule
    prefix_group: Ints | None
    vocabulary: int | None
    target_offsets: Ints | None = None  # (windows,) where the targets of each begin among all targets of the source

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def lengths(self) -> Ints:
        return self.windows.lengths

    @property
    def batches(self) -> list[Ints] | None:
        """The windows of each batch, grouped as in the source that they come from."""
        if self.batch_ends is None:
            return None
        return [part for part in np.split(np.arange(len(self)), self.batch_ends[:-1]) if len(part)]

    def window(self, index: int) -> Window:
        return self.windows.window(index)


def subset_of(source: WindowSource, batches: Sequence[Ints]) -> WindowSubset:
    """A source with only the windows of these batches, in the same order."""
    indices = np.concatenate(batches).astype(np.int64)
    offsets: Ints | None = getattr(source, "target_offsets", None)
    return WindowSubset(
        indices=indices,
        windows=PackedWindows.of([source.window(index) for index in indices.tolist()]),
        batch_ends=np.cumsum([len(batch) for batch in batches]),
        prefix_group=None if source.prefix_group is None else np.asarray(source.prefix_group)[indices],
        vocabulary=source.vocabulary,
        target_offsets=None if offsets is None else np.asarray(offsets)[indices],
    )


@dataclass(frozen=True, slots=True, eq=False)
class WindowLengths:
    """The lengths of a source's windows. If no windows share a prompt, an engine finds batches by lengths alone."""

    lengths: Ints
    vocabulary: int | None
    prefix_group: None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def window(self, index: int) -> Window:
        raise AssertionError("batches of windows without a common prompt follow from their lengths")


@dataclass(frozen=True, slots=True)
class SentBaseline:
    """The path of a reference or a file of base logits. Each replica opens it on its own node and checks its seal."""

    path: str
    seal: dict[str, Any] | str  # a reference's manifest, or a file's sha256
    uri: str | None = None  # where every node may fetch a copy of its own

    @staticmethod
    def of(baseline: Baseline | WholeDistributions) -> SentBaseline:
        """The path and the seal of a stored baseline. An open model is refused: it lives in this process alone."""
        if isinstance(baseline, StoredBaseline):
            stored = baseline.stored
            return SentBaseline(str(stored.folder.resolve()), dict(stored.manifest), _uri(stored.place))
        if isinstance(baseline, FileBaseline):
            path = baseline.file.path.resolve()
            return SentBaseline(str(path), remembered_sha256(path), _uri(baseline.file.place))
        raise EngineError(
            "replicas cannot be compared with a baseline that runs beside them",
            fix="make a reference of the baseline first: scoremode reference MODEL --out ref/",
        )

    def open(self) -> Reference | KldFile:
        """Opens the baseline on this node; RunError if the node has no baseline at the path, or a different one."""
        path, is_file = Path(self.path), isinstance(self.seal, str)
        what = "file" if is_file else "reference"
        # the driver's copy of a URI may be read only where driver and node share a cache: others may remove it
        is_here = path.exists() and (self.uri is None or path.is_relative_to(cache_folder().resolve()))
        # a copy of a reference may lack files, which are fetched when their rows are needed
        where = self.path if is_here and (is_file or self.uri is None) else self.uri
        if where is None:
            raise RunError(f"this node has no {what} in {self.path}", fix=SHARED)
        found: Reference | KldFile = KldFile(where) if is_file else open_reference(where)  # fetched once per node
        seal = remembered_sha256(found.path) if isinstance(found, KldFile) else dict(found.manifest)
        if seal != self.seal:
            raise RunError(f"this node has another {what} in {self.uri or self.path}", fix=SHARED)
        return found


def _uri(place: Place | None) -> str | None:
    """The URI, if other machines can read it, else None: memory:// belongs to this process alone."""
    return None if place is None or place.scheme == "memory" else str(place)


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
    rules: DrawingRules | None = None  # to write texts by
    candidates: Mapping[str, str] | None = None  # whose weights are swapped in, each with the fingerprint of its files

    @staticmethod
    def of(
        chosen: Chosen,
        tokenizer: str | None,
        work: Work,
        rules: DrawingRules | None = None,
        candidates: Mapping[str, str] | None = None,
    ) -> ReplicaSpec:
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
            rules=rules,
            candidates=candidates,
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
        token = getattr(chosen.options, "token", None)
        for name, fingerprint in (self.candidates or {}).items():
            if candidate_fingerprint(name, token) != fingerprint:
                raise EngineError(f"{host} has other weights in {name}", fix=OTHER_FILES)


def _plain_settings(chosen: Chosen) -> dict[str, Any]:
    """The settings of an engine as JSON gives them back, so that those of two machines can be compared."""
    found: dict[str, Any] = json.loads(json.dumps(without_secrets(dict(chosen.settings())), default=str))
    return found


def _versions(plugin: EnginePlugin) -> dict[str, str]:
    """Versions of scoremode and of the libraries that the engine's numbers come from."""
    return {"scoremode": __version__, **installed_versions(plugin.packages)}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


# ── the replica ───────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class WriterFacts:
    """What the driver must know of a writer: the fields of ``Writer``."""

    ends: frozenset[int]
    size: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """What a replica reports when its engine is open."""

    facts: EngineFacts
    longest: int | None
    host: str
    node: str  # its id in Ray
    pid: int
    seconds: float  # to open the engine
    writes: WriterFacts | None = None  # of a replica that writes
    swaps: SwapFacts | None = None  # of a replica that swaps weights


@dataclass(frozen=True, slots=True)
class Finished:
    """The last item that a replica sends for a piece of work."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The scores of the probe window, which a replica sends before its first answers."""

    logprob: Floats | ScoremodeError


@dataclass(frozen=True, slots=True)
class MeasuredSwap:
    """What a swap did; None if its weights are the baseline's."""

    columns: SwapColumns | None


def as_our_error(error: Exception) -> ScoremodeError:
    """Converts an error to a class in errors.py, because other classes may not exist in the driver's process."""
    if isinstance(error, ScoremodeError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == ScoremodeError.__module__)
        found: ScoremodeError = kind(error.message, fix=error.fix)
        return found
    words = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return EngineError(f"the engine failed ({words})", fix="run the same command again to resume")


def _returns_errors(
    method: Callable[Concatenate[Replica, P], T],
) -> Callable[Concatenate[Replica, P], T | ScoremodeError]:
    """Lets a method return its error instead of raising it."""

    @functools.wraps(method)
    def safe(self: Replica, /, *arguments: P.args, **named: P.kwargs) -> T | ScoremodeError:
        try:
            return method(self, *arguments, **named)
        except Exception as error:
            return as_our_error(error)

    return safe


class Replica:
    """An engine that does pieces of work. Ray makes an actor of this class."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._writer: Writer | None = None
        self._swapper: Swapper | None = None
        self._opened: dict[str, Reference | KldFile] = {}  # baselines, so that each is checked once

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "open comes first"
        return self._engine

    def where(self) -> str:
        """The name of the host. This call returns as soon as the actor has a process."""
        return socket.gethostname()

    @_returns_errors
    def open(self, spec: ReplicaSpec) -> Opened:
        import ray

        began = time.perf_counter()
        if os.path.isdir(spec.folder):
            os.chdir(spec.folder)
        chosen = choose(spec.model, spec.engine, spec.options, spec.tokenizer)
        spec.require_same(chosen)
        writes, swaps, longest = None, None, None
        plugin, opening = chosen.plugin, (chosen.subject, chosen.options, spec.work)
        if spec.rules is not None:
            self._writer = writer = plugin.open_writer(*opening, spec.rules)
            facts, writes = writer.facts, WriterFacts(writer.ends, writer.size, writer.missing)
        elif spec.candidates is not None:
            self._swapper = plugin.open_swapper(*opening, tuple(spec.candidates))
            facts, swaps = self._swapper.engine_facts(), self._swapper.facts
        else:
            self._engine = open_engine(chosen, spec.work)
            facts, longest = self.engine.facts, self.engine.longest
        seconds, node = time.perf_counter() - began, ray.get_runtime_context().get_node_id()
        return Opened(facts, longest, socket.gethostname(), node, os.getpid(), seconds, writes, swaps)

    @_returns_errors
    def batches(self, source: WindowSubset | WindowLengths) -> list[Ints] | None:
        """Which windows share a batch, by the engine's own rule."""
        return self.engine.batches(source)

    def _baseline(self, sent: SentBaseline, subset: WindowSubset) -> StoredBaseline | FileBaseline:
        if sent.path not in self._opened:
            self._opened[sent.path] = sent.open()
        found = self._opened[sent.path]
        if isinstance(found, KldFile):
            return FileBaseline(found, subset.indices)
        assert subset.target_offsets is not None, "a plan knows where the targets of a window begin"
        return StoredBaseline(found, offsets=subset.target_offsets)

    def score(
        self,
        subset: WindowSubset,
        done: Bools,
        want: Want,
        against: SentBaseline | None,
        *,
        oldest: float,
        probe: WindowSubset | None,
    ) -> Iterator[Probed | PackedAnswers | Finished | ScoremodeError]:
        """Yields the answers of a piece, a few megabytes at a time; then ``Finished`` or an error."""
        if probe is not None:
            yield Probed(self._probe(probe))
        began = sent = time.perf_counter()
        waiting = AnswerPacker()
        refusal: ScoremodeError | None = None
        try:
            if against is not None:
                want = replace(want, against=self._baseline(against, subset))
            for window, answers in self.engine.score(subset, done, want):
                # answers that do not fit into columns are a fault of the engine, in the words of the driver's own check
                check_shapes(subset.window(window).targets.shape, int(subset.indices[window]), answers)
                if not waiting.fits(answers):
                    yield waiting.take()
                waiting.add(window, answers)
                if waiting.size >= BLOCK_BYTES or time.perf_counter() - sent >= oldest:
                    yield waiting.take()
                    sent = time.perf_counter()
        except Exception as error:
            refusal = as_our_error(error)
        if waiting.found:
            yield waiting.take()
        yield refusal or Finished(time.perf_counter() - began)

    def write(
        self, asked: Sequence[WritingRequest], done: Bools
    ) -> Iterator[tuple[int, WrittenTokens] | Finished | ScoremodeError]:
        """Yields the texts of a piece, each when it has ended; then ``Finished`` or an error."""
        assert self._writer is not None, "a replica that was opened to write"
        began = time.perf_counter()
        try:
            yield from self._writer.write(asked, done, lambda tokens: None)
            yield Finished(time.perf_counter() - began)
        except Exception as error:
            yield as_our_error(error)

    @_returns_errors
    def account(self) -> list[str]:
        """What a reader of the texts must know about how they were written."""
        assert self._writer is not None, "a replica that was opened to write"
        return self._writer.account()

    def swap(self, sent: tuple[Plan, list[Swap]], number: int) -> Iterator[MeasuredSwap | Finished | ScoremodeError]:
        """Measures one of the swaps that were sent, with the states that all of them start from."""
        assert self._swapper is not None, "a replica that was opened to swap"
        began, (plan, swaps) = time.perf_counter(), sent
        try:
            self._swapper.record(plan, swaps, lambda fed: None)
            ((_, columns),) = self._swapper.columns(plan, [swaps[number]], lambda number, part: None)
            yield MeasuredSwap(columns)
            yield Finished(time.perf_counter() - began)
        except Exception as error:
            yield as_our_error(error)

    @_returns_errors
    def swap_noise(self, plan: Plan) -> NoiseFloor:
        assert self._swapper is not None, "a replica that was opened to swap"
        return self._swapper.noise(plan)

    @_returns_errors
    def _probe(self, subset: WindowSubset) -> Floats:
        ((_, answers),) = self.engine.score(subset, np.zeros(len(subset), np.bool_))
        return answers.logprob

    def facts(self) -> EngineFacts:
        """The engine's current facts. They may change: the kernel of divergences is checked when it is first used."""
        return self.engine.facts if self._swapper is None else self._swapper.engine_facts()

    @_returns_errors
    def stored_head(self) -> StoredHead:
        return self.engine.stored_head()

    @_returns_errors
    def noise_floor(self, place: SentBaseline | None, subset: WindowSubset, done: Bools) -> NoiseFloor:
        """The noise floor against a baseline; if ``place`` is None, against states that this replica computes now."""
        if place is None:
            baseline: Any = HeldBaseline(self.engine, subset, done)
        else:
            baseline = self._baseline(place, subset)
        return self.engine.noise_floor(baseline, subset, done)

    def close(self) -> None:
        engine, self._engine = self._engine or self._writer or self._swapper, None
        if engine is not None:
            engine.close()
