"""One replica: a Ray actor that opens a worker on its node, and calls its methods by name.

The worker of most replicas scores: windows in, answers out, a few megabytes at a time.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.disk.files import remembered_sha256
from scoremode.core.disk.manifests import without_secrets
from scoremode.core.disk.uri import RemotePath
from scoremode.core.engine.base import (
    Engine,
    EngineFacts,
    FinalStates,
    NoiseFloor,
    StoredDistributions,
    Wanted,
    WholeDistributions,
)
from scoremode.core.engine.baseline import held_states, stored_states
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import ChosenEngine, choose, open_engine
from scoremode.core.installation import installed_versions
from scoremode.core.references.format import ReferenceManifest
from scoremode.core.references.reader import Reference, open_reference
from scoremode.core.scores.answers import Window, WindowSource, check_shapes
from scoremode.core.verbs.replicas import OTHER_FILES, OpenWorker, Worker
from scoremode.errors import EngineError, RunError, ScoremodeError
from scoremode.remote.ray.packing import AnswerPacker, PackedAnswers, PackedWindows
from scoremode.values import Bools, Ints
from scoremode.version import __version__

SHARED = "put it on storage that every node sees under this path"
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
            host, shown_names = socket.gethostname(), ", ".join(names[:3])
            values = f" ({here.get(names[0])} instead of {self.facts.get(names[0])})" if len(names) == 1 else ""
            raise EngineError(f"{host} has other {shown_names} for {self.model}{values}", fix=OTHER_FILES)


def facts_of(chosen: ChosenEngine) -> dict[str, str]:
    """What must be the same on every node: weights, tokenizer, versions of libraries, and settings of the engine."""
    subject, settings = chosen.subject, without_secrets(dict(chosen.settings()))
    facts = {"weights": subject.fingerprint, "tokenizer": subject.tokenizer.facts.fingerprint}
    versions = {"scoremode": __version__, **installed_versions(chosen.plugin.packages)}
    facts |= {f"version of {name}": version for name, version in versions.items()}
    return facts | {
        f"setting {name}": json.dumps(value, default=str, sort_keys=True) for name, value in settings.items()
    }


@dataclass(frozen=True, slots=True)
class Opened:
    """What a replica reports when its worker is open."""

    facts: EngineFacts
    about: Any  # of the worker
    host: str
    pid: int


class FinishedPiece:
    """The last item that a replica sends for a piece of work."""


def as_our_error(error: Exception) -> ScoremodeError:
    """Converts an error to a class in errors.py, because other classes may not exist in the driver's process."""
    if isinstance(error, ScoremodeError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == ScoremodeError.__module__)
        copy: ScoremodeError = kind(error.message, fix=error.fix)
        return copy
    message = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return EngineError(f"the engine failed ({message})", fix="run the same command again to resume")


class Replica:
    """A worker that does pieces of work. Ray makes an actor of this class. Errors are returned instead of raised."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._worker: Any = None  # not open yet

    def open(self) -> Opened | ScoremodeError:
        spec = self._spec
        if os.path.isdir(spec.folder):
            os.chdir(spec.folder)
        try:
            chosen = choose(spec.model, spec.engine, spec.options, spec.tokenizer)
            spec.require_same(chosen)
            worker = spec.open_worker(chosen, spec.work)
        except Exception as error:
            return as_our_error(error)
        self._worker = worker.methods
        return Opened(worker.facts, worker.about, socket.gethostname(), os.getpid())

    def call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._worker, name)(*arguments)
        except Exception as error:
            return as_our_error(error)

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        """Yields what a method yields; then ``FinishedPiece`` or an error."""
        try:
            yield from getattr(self._worker, name)(*arguments)
        except Exception as error:
            yield as_our_error(error)
        else:
            yield FinishedPiece()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────────────────────────
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
class SealedPath:
    """The path of a reference or a file of distributions. Each replica opens it on its node and checks its seal."""

    path: str
    seal: ReferenceManifest | str  # or a file's sha256
    uri: str | None = None  # where every node may fetch a copy of its own
    kind: type[StoredDistributions] | None = None  # of a file; None: it is a reference

    @staticmethod
    def of(baseline: FinalStates | WholeDistributions) -> SealedPath:
        """The path and the seal of a stored baseline. An open model is refused: it lives in this process alone."""
        if isinstance(baseline, FinalStates) and baseline.stored is not None:
            stored = baseline.stored
            return SealedPath(str(stored.folder.resolve()), stored.manifest, _uri(stored.place))
        if isinstance(baseline, StoredDistributions) and baseline.file is not None:
            path = baseline.file.path.resolve()
            return SealedPath(str(path), remembered_sha256(path), _uri(baseline.file.place), type(baseline))
        raise EngineError(
            "replicas cannot be compared with a baseline that runs beside them",
            fix="make a reference of the baseline first: scoremode reference MODEL --out ref/",
        )

    def open(self) -> Reference | StoredDistributions:
        """Opens the baseline on this node; RunError if the node has no baseline at the path, or a different one."""
        noun, where = "reference" if self.kind is None else "file", self.uri or self.path
        if self.uri is None and not Path(self.path).exists():
            raise RunError(f"this node has no {noun} in {self.path}", fix=SHARED)
        baseline = open_reference(where) if self.kind is None else self.kind.at(where)  # a URI is fetched once per node
        seal = baseline.manifest if isinstance(baseline, Reference) else remembered_sha256(baseline.file.path)
        if seal != self.seal:
            raise RunError(f"this node has another {noun} in {where}", fix=SHARED)
        return baseline


def _uri(place: RemotePath | None) -> str | None:
    """The URI, if other machines can read it, else None: memory:// belongs to this process alone."""
    return None if place is None or place.scheme == "memory" else str(place)


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
        self, subset: WindowSubset, done: Bools, want: Wanted, against: SealedPath | None, oldest: float
    ) -> Iterator[PackedAnswers]:
        """Yields the answers of a piece in blocks, none of which waits for more than ``oldest`` seconds."""
        if against is not None:
            want = replace(want, against=self._stored(against, subset))
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

    def _stored(self, sent: SealedPath, subset: WindowSubset) -> FinalStates | StoredDistributions:
        if sent.path not in self._opened:
            self._opened[sent.path] = sent.open()
        baseline = self._opened[sent.path]
        if not isinstance(baseline, Reference):
            return baseline.part(subset.indices)
        assert subset.target_offsets is not None, "a plan knows where the targets of a window begin"
        return stored_states(baseline, subset.target_offsets)

    def noise_floor(self, subset: WindowSubset, done: Bools) -> NoiseFloor:
        """The noise floor against states that this replica computes now, in the batches of the run."""
        return self.engine.noise_floor(held_states(self.engine, subset, done), subset, done)
