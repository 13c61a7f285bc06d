"""What is wanted of a replica, as it travels: a baseline is named, and each replica opens it on its own node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoremode.cluster.parcels import Parcel
from scoremode.engines.base import Baseline, StoredDistributions, Want
from scoremode.engines.base_logits import FileBaseline
from scoremode.engines.baseline import StoredBaseline
from scoremode.errors import EngineError, RunError, ScoremodeError
from scoremode.places.cache_home import cache_folder
from scoremode.places.uri import Place
from scoremode.store.cache import remembered_sha256
from scoremode.store.kld import KldFile
from scoremode.store.reference import Reference

SHARED = "put it on storage that every node sees under this path"


@dataclass(frozen=True, slots=True)
class PlacedReference:
    """A reference, by its folder and by what its manifest says of its files."""

    folder: str
    seal: dict[str, Any]
    uri: str | None = None  # where every node may fetch a copy of its own


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """A file of base logits."""

    path: str
    sha256: str
    uri: str | None = None


@dataclass(frozen=True, slots=True)
class PlacedWant:
    """What is wanted of each window in addition to its scores."""

    states: bool = False
    records: bool = False
    against: PlacedReference | PlacedFile | None = None


def placed(want: Want) -> PlacedWant:
    """As it travels. A baseline that runs at the same time lives in this process alone."""
    against = None if want.against is None else placed_baseline(want.against)
    return PlacedWant(want.states, want.records, against)


def placed_baseline(baseline: Baseline | StoredDistributions) -> PlacedReference | PlacedFile:
    if isinstance(baseline, StoredBaseline):
        stored = baseline.stored
        return PlacedReference(str(stored.folder.resolve()), dict(stored.manifest), _uri(stored.place))
    if isinstance(baseline, FileBaseline):
        path = baseline.file.path.resolve()
        return PlacedFile(str(path), remembered_sha256(path), _uri(baseline.file.place))
    raise EngineError(
        "replicas cannot be compared with a baseline that runs beside them",
        fix="make a reference of the baseline first: scoremode reference MODEL --out ref/",
    )


def _uri(place: Place | None) -> str | None:
    """What other machines may read: memory:// is of this process alone."""
    return None if place is None or place.scheme == "memory" else str(place)


def _is_here(path: Path, uri: str | None) -> bool:
    """May this node read the driver's path? A copy of a URI only if both have one cache: others may remove it."""
    return path.exists() and (uri is None or path.is_relative_to(cache_folder().resolve()))


class OpenBaselines:
    """Baselines that a replica has opened, so that each is checked once."""

    def __init__(self) -> None:
        self._references: dict[str, Reference] = {}
        self._files: dict[str, KldFile] = {}

    def want(self, asked: PlacedWant, parcel: Parcel) -> Want:
        against = None if asked.against is None else self.baseline(asked.against, parcel)
        return Want(asked.states, against, asked.records)

    def baseline(self, place: PlacedReference | PlacedFile, parcel: Parcel) -> Any:
        if isinstance(place, PlacedFile):
            return FileBaseline(self._file(place), parcel.indices)
        assert parcel.target_offsets is not None, "a plan knows where the targets of a window begin"
        return StoredBaseline(self._reference(place), offsets=parcel.target_offsets)

    def _reference(self, place: PlacedReference) -> Reference:
        if place.folder not in self._references:
            where = place.folder if _is_here(Path(place.folder), place.uri) else place.uri
            if where is None:
                raise RunError(f"this node has no reference in {place.folder}", fix=SHARED)
            found = Reference.open(where)  # of a URI, one replica of a node fetches a copy, the others wait for it
            if dict(found.manifest) != place.seal:
                raise RunError(f"this node has another reference in {place.uri or place.folder}", fix=SHARED)
            self._references[place.folder] = found
        return self._references[place.folder]

    def _file(self, place: PlacedFile) -> KldFile:
        if place.path not in self._files:
            where = place.path if _is_here(Path(place.path), place.uri) else place.uri
            if where is None:
                raise RunError(f"this node has no file {place.path}", fix=SHARED)
            found = KldFile(where)
            if remembered_sha256(found.path) != place.sha256:
                raise RunError(f"this node has another file in {place.uri or place.path}", fix=SHARED)
            self._files[place.path] = found
        return self._files[place.path]


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

    def error(self, where: str | None = None) -> ScoremodeError:
        """The error itself, for whoever asked."""
        from scoremode import errors

        kind = getattr(errors, self.kind, errors.EngineError)
        message = self.message if where is None else f"{where}: {self.message}"
        found: ScoremodeError = kind(message, fix=self.fix)
        return found

    @property
    def is_input(self) -> bool:
        """Would every replica say the same?"""
        from scoremode import errors

        kind = getattr(errors, self.kind, errors.EngineError)
        return issubclass(kind, errors.InputError)
