"""Folders of attributions: one process at a time, and every finished unit kept at once.

DIR/attribution.journal   a record for each unit that was measured: its sums
DIR/attribution.json      what was measured and how; written last, so if it is there, the attribution is complete
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from scoremode.core.cache.entries import mark_used
from scoremode.core.cache.eviction import make_room
from scoremode.core.disk.folders import ATTRIBUTION, PARTIAL_ATTRIBUTION
from scoremode.core.disk.manifests import Count, Text, is_sealed, unusable_field
from scoremode.core.disk.records import RecordFile
from scoremode.core.store.resumable import ResumableFolder
from scoremode.core.strict_json import read_object
from scoremode.errors import RunError

AGAIN = "measure again with --fresh"


class UnitForm(msgspec.Struct):
    name: Text
    layer: Count | None
    kind: str | None
    weights: Count
    format: str
    bits: float
    bits_saved: float
    record: int


class CandidateForm(msgspec.Struct):
    name: Text
    bits_per_weight: float
    notes: list[str]
    whole: int
    units: list[UnitForm]


class CellsForm(msgspec.Struct):
    group: list[Count]
    half: list[Literal[0, 1]]
    weight: list[float]
    targets: list[Count]


class ToolForm(msgspec.Struct):
    tool: Text
    suffix: Text
    text: str
    command: str
    notes: list[str]


class RecipeForm(msgspec.Struct):
    budget: Text
    chosen: dict[str, str]
    bits_per_weight: float
    predicted: float
    gap: float
    record: int
    written: list[ToolForm]


class ServedForm(msgspec.Struct):
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


class AttributionFolder(ResumableFolder[dict[str, Any]]):
    """A folder for an attribution: inside a ``with`` block, its finished manifest, or else the right to write there."""

    kind, manifest, journal = "attribution", ATTRIBUTION, PARTIAL_ATTRIBUTION
    what, other, again = "a folder of an attribution", "another attribution (it differs in: {})", AGAIN

    def __init__(self, folder: Path, identity: dict[str, Any], *, fresh: bool = False) -> None:
        super().__init__(folder, json.loads(json.dumps(identity)), fresh=fresh)
        self.records: dict[int, bytes] = {}  # of units that were measured

    def _read_manifest(self) -> dict[str, Any]:
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

    def _open(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if not (self.folder / PARTIAL_ATTRIBUTION).exists():
            raise RunError(f"{self.folder} contains {ATTRIBUTION} without its journal", fix=AGAIN)
        self._read_records()
        mark_used(self.folder)
        return manifest

    def _read_records(self) -> None:
        if self._records is None:
            self._records = RecordFile(self.folder / PARTIAL_ATTRIBUTION, self._header())
        self.records = {number: body for number, _, body in self._records.replay()}

    def begin(self) -> None:
        """Takes the folder over when the model is ready; ``records`` has what was measured before."""
        self._remove(*(ATTRIBUTION, PARTIAL_ATTRIBUTION) if self._fresh else ())
        self._read_records()

    def add(self, number: int, body: bytes) -> None:
        assert self._records is not None, "begin comes first"
        self._records.append(number, body)
        self.records[number] = body

    def save(self, manifest: dict[str, Any]) -> dict[str, Any]:
        whole = self._write_manifest({"identity": self.identity, **manifest})
        make_room(self.folder)
        return whole
