"""Folders of attributions: one process at a time, and every finished unit kept at once.

DIR/attribution.journal   a record for each unit that was measured: its sums
DIR/attribution.json      what was measured and how; written last, so if it is there, the attribution is complete
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from scoremode.core.disk.folders import ATTRIBUTION, PARTIAL_ATTRIBUTION
from scoremode.core.disk.manifests import Count, Text
from scoremode.core.store.resumable import Resumable
from scoremode.errors import RunError

AGAIN = "measure again with --fresh"


class CellsForm(msgspec.Struct):
    group: list[Count]
    half: list[Literal[0, 1]]
    weight: list[float]
    targets: list[Count]


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
    candidates: list[dict[str, Any]]  # these two are checked when their sums are read: see result.py
    recipe: dict[str, Any] | None
    served: dict[str, ServedForm] = {}


class AttributionFolder(Resumable[dict[str, Any]]):
    """A folder for an attribution: inside a ``with`` block, its finished manifest, or else the right to write there."""

    what, other, again = "a folder of an attribution", "another attribution (it differs in: {})", AGAIN
    manifest, form = ATTRIBUTION, ManifestForm
    journal, header, keeps_journal = PARTIAL_ATTRIBUTION, {"for": "attribution"}, True

    def __init__(self, folder: Path, identity: dict[str, Any], *, fresh: bool = False) -> None:
        super().__init__(folder, json.loads(json.dumps(identity)), fresh=fresh)
        self.records: dict[int, bytes] = {}  # of units that were measured

    def _open(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if not (self.folder / PARTIAL_ATTRIBUTION).exists():
            raise RunError(f"{self.folder} contains {ATTRIBUTION} without its journal", fix=AGAIN)
        if self._lock is not None:
            self._read_records()
        return manifest

    def _read_records(self) -> None:
        self.records = {number: body for number, _, body in self.open_journal().replay()}

    def begin(self) -> None:
        """Takes the folder over when the model is ready; ``records`` has what was measured before."""
        super().begin()
        self._read_records()

    def add(self, number: int, body: bytes) -> None:
        assert self._records is not None, "begin comes first"
        self._records.append(number, body)
        self.records[number] = body

    def save(self, manifest: dict[str, Any]) -> dict[str, Any]:
        return self.finish({"identity": self.identity, **manifest})
