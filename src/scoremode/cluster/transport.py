"""Windows, wants and errors on their way to replicas and back. Answers are ``scores.packing.PackedAnswers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scoremode import errors
from scoremode.disk.files import remembered_sha256
from scoremode.disk.folders import cache_folder
from scoremode.engines.base import Baseline, StoredDistributions, Want
from scoremode.engines.baseline import FileBaseline, StoredBaseline
from scoremode.errors import EngineError, InputError, RunError, ScoremodeError
from scoremode.plan.windows import Window, WindowSource
from scoremode.references.kld import KldFile
from scoremode.references.reader import Reference
from scoremode.remote.uri import Place
from scoremode.scores.packing import PackedWindows
from scoremode.store.remote_copies import open_reference
from scoremode.values import Ints

SHARED = "put it on storage that every node sees under this path"


@dataclass(frozen=True, slots=True, eq=False)
class WindowSubset:
    """Some windows of a source, as a source of its own, which says which of them share a batch."""

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
        """Windows that share a batch, as the source they come from has it."""
        if self.batch_ends is None:
            return None
        return [part for part in np.split(np.arange(len(self)), self.batch_ends[:-1]) if len(part)]

    def window(self, index: int) -> Window:
        return self.windows.window(index)


def subset_of(source: WindowSource, batches: Sequence[Ints]) -> WindowSubset:
    """The windows of whole batches, in their order."""
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
    """The lengths of a source's windows: enough to find batches where no windows share a prompt."""

    lengths: Ints
    vocabulary: int | None
    prefix_group: None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def window(self, index: int) -> Window:
        raise AssertionError("batches of windows without a common prompt follow from their lengths")


@dataclass(frozen=True, slots=True)
class SentBaseline:
    """A reference or a file of base logits by its path. Each replica opens it on its own node, and checks the seal."""

    path: str
    seal: dict[str, Any] | str  # a reference's manifest, or a file's sha256
    uri: str | None = None  # where every node may fetch a copy of its own

    @property
    def is_file(self) -> bool:
        return isinstance(self.seal, str)

    @staticmethod
    def of(baseline: Baseline | StoredDistributions) -> SentBaseline:
        """A baseline that runs at the same time lives in this process alone, and is refused."""
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


def _uri(place: Place | None) -> str | None:
    """A URI that other machines can read: memory:// belongs to this process alone."""
    return None if place is None or place.scheme == "memory" else str(place)


@dataclass(frozen=True, slots=True)
class SentWant:
    """What is wanted of each window in addition to its scores."""

    states: bool = False
    records: bool = False
    against: SentBaseline | None = None

    @staticmethod
    def of(want: Want) -> SentWant:
        return SentWant(want.states, want.records, None if want.against is None else SentBaseline.of(want.against))


class OpenBaselines:
    """Baselines that a replica has opened, so that each is checked once."""

    def __init__(self) -> None:
        self._open: dict[str, Reference | KldFile] = {}

    def want(self, asked: SentWant, subset: WindowSubset) -> Want:
        against = None if asked.against is None else self.baseline(asked.against, subset)
        return Want(asked.states, against, asked.records)

    def baseline(self, place: SentBaseline, subset: WindowSubset) -> StoredBaseline | FileBaseline:
        if place.path not in self._open:
            self._open[place.path] = _open(place)
        found = self._open[place.path]
        if isinstance(found, KldFile):
            return FileBaseline(found, subset.indices)
        assert subset.target_offsets is not None, "a plan knows where the targets of a window begin"
        return StoredBaseline(found, offsets=subset.target_offsets)


def _open(place: SentBaseline) -> Reference | KldFile:
    """The baseline on this node; RunError if the node has none, or another one, in its place."""
    path, what = Path(place.path), "file" if place.is_file else "reference"
    # the driver's copy of a URI may be read only where driver and node share a cache: others may remove it
    is_here = path.exists() and (place.uri is None or path.is_relative_to(cache_folder().resolve()))
    where = place.path if is_here else place.uri
    if where is None:
        raise RunError(f"this node has no {what} in {place.path}", fix=SHARED)
    found: Reference | KldFile = KldFile(where) if place.is_file else open_reference(where)  # fetched once per node
    seal = remembered_sha256(found.path) if isinstance(found, KldFile) else dict(found.manifest)
    if seal != place.seal:
        raise RunError(f"this node has another {what} in {place.uri or place.path}", fix=SHARED)
    return found


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of a replica, as it travels."""

    kind: str  # the class in errors.py
    message: str
    fix: str

    @staticmethod
    def of(error: Exception) -> Refusal:
        if isinstance(error, ScoremodeError):
            return Refusal(type(error).__name__, error.message, error.fix)
        words = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        return Refusal("EngineError", f"the engine failed ({words})", "run the same command again to resume")

    @property
    def _class(self) -> type[ScoremodeError]:
        found: type[ScoremodeError] = getattr(errors, self.kind, EngineError)
        return found

    def error(self) -> ScoremodeError:
        """The error itself, to be raised in the driver."""
        return self._class(self.message, fix=self.fix)

    @property
    def is_input(self) -> bool:
        """Would every replica say the same?"""
        return issubclass(self._class, InputError)
