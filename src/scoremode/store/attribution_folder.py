"""Folders of attributions: one process at a time, and every finished unit kept at once.

DIR/attribution.journal   a record for each unit that was measured: its sums
DIR/attribution.json      what was measured and how; written last, so if it is there, the attribution is complete
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from scoremode.cache.entries import is_cached, mark_used
from scoremode.cache.eviction import make_room
from scoremode.disk.files import write_atomically
from scoremode.disk.folders import ATTRIBUTION, PARTIAL_ATTRIBUTION, TEMPORARY
from scoremode.disk.locks import Lock
from scoremode.disk.manifests import differing_fields, is_sealed, sealed
from scoremode.disk.records import RecordFile, read_record_header
from scoremode.errors import RunError, harmless, readable
from scoremode.store.runs import lock_folder, require_possible
from scoremode.strict_json import read_object

KIND = "attribution"
REPLACE = "give another --out, or --fresh to replace it"


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
        present = {p.name for p in folder.iterdir() if not p.name.startswith(".")} if folder.exists() else set()
        foreign = sorted(present - {ATTRIBUTION, PARTIAL_ATTRIBUTION})
        if foreign:
            what = f"{folder} is not a folder of an attribution: it contains {harmless(foreign[0])}"
            raise RunError(what, fix="give a new or empty folder to --out")
        if self._fresh:
            return None
        manifest = None
        if ATTRIBUTION in present:
            manifest = self._manifest()
            self._require_same(manifest["identity"])
        if PARTIAL_ATTRIBUTION in present:
            header = read_record_header(folder / PARTIAL_ATTRIBUTION)
            if header is not None:  # else a kill left less than the first line
                identity = header.get("identity")
                if header.get("for") != KIND or not isinstance(identity, dict):
                    raise RunError(f"{folder / PARTIAL_ATTRIBUTION} is not a file of scoremode", fix=REPLACE)
                self._require_same(identity)
        elif manifest is not None:
            raise RunError(f"{folder} contains {ATTRIBUTION} without its journal", fix="measure again with --fresh")
        return manifest

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / ATTRIBUTION
        try:
            found = read_object(path)
        except (ValueError, OSError):
            found = {}
        if not is_sealed(found) or not isinstance(found.get("identity"), dict):
            raise RunError(f"{path} is damaged or was changed", fix="measure again with --fresh")
        return found

    def _require_same(self, known: dict[str, Any]) -> None:
        differing = differing_fields(known, self.identity)
        if differing:
            raise RunError(f"{self.folder} contains another attribution (it differs in: {differing})", fix=REPLACE)

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = RecordFile(self.folder / PARTIAL_ATTRIBUTION, {"for": KIND, "identity": self.identity})
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
