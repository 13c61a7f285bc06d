"""The windows and the baselines that are sent to replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.disk.files import remembered_sha256
from scoremode.core.disk.folders import cache_folder
from scoremode.core.disk.uri import RemotePath
from scoremode.core.engine.base import Baseline, StoredDistributions, WholeDistributions
from scoremode.core.engine.baseline import StoredBaseline
from scoremode.core.references.reader import Reference, open_reference
from scoremode.core.scores.answers import Window, WindowSource
from scoremode.core.scores.packing import PackedWindows
from scoremode.errors import EngineError, RunError
from scoremode.values import Ints

SHARED = "put it on storage that every node sees under this path"


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
    """The path of a reference or a file of distributions. Each replica opens it on its node and checks its seal."""

    path: str
    seal: dict[str, Any] | str  # a reference's manifest, or a file's sha256
    uri: str | None = None  # where every node may fetch a copy of its own
    kind: type[StoredDistributions] | None = None  # of a file; None: it is a reference

    @staticmethod
    def of(baseline: Baseline | WholeDistributions) -> SentBaseline:
        """The path and the seal of a stored baseline. An open model is refused: it lives in this process alone."""
        if isinstance(baseline, StoredBaseline):
            stored = baseline.stored
            return SentBaseline(str(stored.folder.resolve()), dict(stored.manifest), _uri(stored.place))
        if isinstance(baseline, StoredDistributions) and baseline.file is not None:
            path = baseline.file.path.resolve()
            return SentBaseline(str(path), remembered_sha256(path), _uri(baseline.file.place), type(baseline))
        raise EngineError(
            "replicas cannot be compared with a baseline that runs beside them",
            fix="make a reference of the baseline first: scoremode reference MODEL --out ref/",
        )

    def open(self) -> Reference | StoredDistributions:
        """Opens the baseline on this node; RunError if the node has no baseline at the path, or a different one."""
        path, what = Path(self.path), "reference" if self.kind is None else "file"
        # the driver's copy of a URI may be read only where driver and node share a cache: others may remove it
        is_here = path.exists() and (self.uri is None or path.is_relative_to(cache_folder().resolve()))
        # a copy of a reference may lack files, which are fetched when it is opened
        where = self.path if is_here and (self.kind is not None or self.uri is None) else self.uri
        if where is None:
            raise RunError(f"this node has no {what} in {self.path}", fix=SHARED)
        found = open_reference(where) if self.kind is None else self.kind.at(where)  # fetched once per node
        seal = dict(found.manifest) if isinstance(found, Reference) else remembered_sha256(found.file.path)
        if seal != self.seal:
            raise RunError(f"this node has another {what} in {self.uri or self.path}", fix=SHARED)
        return found


def _uri(place: RemotePath | None) -> str | None:
    """The URI, if other machines can read it, else None: memory:// belongs to this process alone."""
    return None if place is None or place.scheme == "memory" else str(place)
