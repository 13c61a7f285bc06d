"""Folders of attributions: one process at a time, and every finished unit kept at once.

DIR/attribution.journal   a record for each unit that was measured: its sums
DIR/attribution.json      what was measured and how; written last, so if it is there, the attribution is complete
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from scoremode.core.cache.entries import is_cached, mark_used
from scoremode.core.cache.eviction import make_room
from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import ATTRIBUTION, PARTIAL_ATTRIBUTION, TEMPORARY, Mark, own_files
from scoremode.core.disk.locks import Lock
from scoremode.core.disk.manifests import Count, Text, differing_fields, is_manifest, is_sealed, sealed, unusable_field
from scoremode.core.disk.records import RecordFile, is_record_file, read_record_header
from scoremode.core.store.runs import lock_folder, require_possible
from scoremode.core.strict_json import read_object
from scoremode.errors import RunError, readable

KIND = "attribution"
REPLACE = "give another --out, or --fresh to replace it"
AGAIN = "measure again with --fresh"
MARKS: dict[str, Mark] = {
    ATTRIBUTION: is_manifest,
    PARTIAL_ATTRIBUTION: lambda path: is_record_file(path, json.dumps({"for": KIND}).encode()[:-1]),
}


class UnitForm(msgspec.Struct):
    """A unit in attribution.json."""

    name: Text
    layer: Count | None
    kind: str | None
    weights: Count
    format: str
    bits: float
    bits_saved: float
    record: int


class CandidateForm(msgspec.Struct):
    """A candidate in attribution.json."""

    name: Text
    bits_per_weight: float
    notes: list[str]
    whole: int
    units: list[UnitForm]


class CellsForm(msgspec.Struct):
    """The cells of the sums, one number each."""

    group: list[Count]
    half: list[Literal[0, 1]]
    weight: list[float]
    targets: list[Count]


class ToolForm(msgspec.Struct):
    """A recipe for a tool."""

    tool: Text
    suffix: Text
    text: str
    command: str
    notes: list[str]


class RecipeForm(msgspec.Struct):
    """A mixture of candidates."""

    budget: Text
    chosen: dict[str, str]
    bits_per_weight: float
    predicted: float
    gap: float
    record: int
    written: list[ToolForm]


class ServedForm(msgspec.Struct):
    """A candidate as an engine serves it."""

    record: int
    engine: str


class FactsForm(msgspec.Struct):
    """The facts about text, plan and engine that pages use."""

    stderr_groups: str


class ManifestForm(msgspec.Struct):
    """The fields of attribution.json that are used."""

    identity: dict[str, Any]
    request: dict[str, Any]
    baseline: Text
    by: Text
    cells: CellsForm
    noise_kl: list[float] | None
    noise_perturbed: str | None
    facts: FactsForm
    notes: list[str]
    candidates: list[CandidateForm]
    recipe: RecipeForm | None
    served: dict[str, ServedForm] = {}


class AttributionFolder:
    """A folder for an attribution: inside a ``with`` block, its finished manifest, or else the right to write there."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, fresh: bool = False) -> None:
        self.folder, self.identity, self._fresh = folder, json.loads(json.dumps(identity)), fresh
        self.finished: dict[str, Any] | None = None
        self.records: dict[int, bytes] = {}  # of units that were measured
        self._lock: Lock | None = None
        self._file: RecordFile | None = None

    def __enter__(self) -> Self:
        require_possible(self.folder)
        self._check()  # before a folder is made
        self._lock, _ = lock_folder(self.folder, waits=is_cached(self.folder))
        try:
            self.finished = self._check()
            if self.finished is not None:
                self._open()
                mark_used(self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.release()

    def _check(self) -> dict[str, Any] | None:
        """Refuses a folder with anything else in it; returns the manifest if this attribution is finished."""
        folder = self.folder
        present = own_files(folder, "a folder of an attribution", MARKS)
        if self._fresh:
            return None
        manifest = None
        if ATTRIBUTION in present:
            manifest = self._manifest()
            self._require_same(manifest["identity"])
        if PARTIAL_ATTRIBUTION in present:
            identity = (read_record_header(folder / PARTIAL_ATTRIBUTION) or {}).get("identity")
            if isinstance(identity, dict):
                self._require_same(identity)
        elif manifest is not None:
            raise RunError(f"{folder} contains {ATTRIBUTION} without its journal", fix=AGAIN)
        return manifest

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / ATTRIBUTION
        try:
            found = read_object(path)
        except (ValueError, OSError):
            found = {}
        wrong = unusable_field(found, ManifestForm)
        if wrong is not None or not is_sealed(found):
            what = "" if wrong is None else f" (no usable {wrong})"
            raise RunError(f"{path} is damaged or was changed{what}", fix=AGAIN)
        return found

    def _require_same(self, known: dict[str, Any]) -> None:
        differing = differing_fields(known, self.identity)
        if differing:
            raise RunError(f"{self.folder} contains another attribution (it differs in: {differing})", fix=REPLACE)

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        path = self.folder / PARTIAL_ATTRIBUTION
        try:
            self._file = RecordFile(path, {"for": KIND, "identity": self.identity})
        except RunError:  # _check found no other identity
            raise RunError(f"{path} is damaged: its first line cannot be read", fix=AGAIN) from None
        self.records = {number: body for number, _, body in self._file.replay()}

    def begin(self) -> None:
        """Takes the folder over when the model is ready; ``records`` has what was measured before."""
        if self._fresh:
            for name in (ATTRIBUTION, PARTIAL_ATTRIBUTION):
                (self.folder / name).unlink(missing_ok=True)
        for left in self.folder.glob(TEMPORARY):
            left.unlink(missing_ok=True)
        self._open()

    def add(self, number: int, body: bytes) -> None:
        """Keeps a finished unit."""
        assert self._file is not None, "begin comes first"
        self._file.append(number, body)
        self.records[number] = body

    def save(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Writes the manifest: the attribution is finished."""
        whole = {"identity": self.identity, **manifest}
        whole = sealed(json.loads(readable(json.dumps(whole, ensure_ascii=False, allow_nan=False))))
        write_atomically(self.folder / ATTRIBUTION, json.dumps(whole, indent=1).encode())
        make_room(self.folder)
        return whole
