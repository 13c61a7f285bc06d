"""Folders of rollouts while texts are written: one process at a time, and every finished text kept at once.

Files are written in this order: journal, texts, manifest; then the journal is removed. With --fresh, a new journal
replaces the old one before the old texts are removed. So after a kill the folder always contains finished rollouts, or
a journal of the texts that were finished.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from scoremode.core.disk.files import file_sha256, write_atomically, written_atomically
from scoremode.core.disk.folders import PARTIAL_TEXTS, ROLLOUTS, TEMPORARY, TEXTS, Mark, own_files
from scoremode.core.disk.locks import Lock
from scoremode.core.disk.manifests import differing_fields, is_manifest, sealed
from scoremode.core.disk.records import RecordFile, is_record_file, read_record_header
from scoremode.core.store.runs import lock_folder, require_possible
from scoremode.errors import RunError, readable
from scoremode.studies.rollouts.texts import (
    FORMAT,
    Rollouts,
    WrittenText,
    has_texts,
    pack,
    read_manifest,
    unpack,
    write_texts,
)
from scoremode.values import Bools, Floats, Ids

KIND = "rollouts"
REPLACE = "give another --out, or --fresh to replace them"
MARKS: dict[str, Mark] = {
    ROLLOUTS: is_manifest,
    TEXTS: has_texts,
    PARTIAL_TEXTS: lambda path: is_record_file(path, json.dumps({"for": KIND}).encode()[:-1]),
}


class RolloutsFolder:
    """A folder for rollouts: inside a ``with`` block, its finished rollouts, or else the right to write there."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, fresh: bool = False) -> None:
        self.folder, self.identity, self._fresh = folder, identity, fresh
        self.finished: Rollouts | None = None
        self._lock: Lock | None = None
        self._records: RecordFile | None = None
        self._at: dict[int, int] = {}  # where the record of each finished text is

    def __enter__(self) -> Self:
        require_possible(self.folder)
        self._check()  # before a folder is made
        self._lock, _ = lock_folder(self.folder, waits=False)
        try:
            if self._check():
                self.finished = Rollouts.open(self.folder)
                (self.folder / PARTIAL_TEXTS).unlink(missing_ok=True)  # a process was killed just before it did this
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._records is not None:
            self._records.close()
        if self._lock is not None:
            self._lock.release()

    def _check(self) -> bool:
        """Refuses a folder with anything else in it; returns whether these rollouts are finished."""
        folder = self.folder
        present = own_files(folder, "a folder of rollouts", MARKS, {ROLLOUTS, TEXTS})
        if self._fresh:
            return False
        begun = self._identity_of_journal() if PARTIAL_TEXTS in present else None
        if ROLLOUTS in present:
            known = read_manifest(folder)["identity"]
            if known == self.identity or begun != self.identity:
                self._require_same(known)
                return True
        elif begun is not None:
            self._require_same(begun)
        elif TEXTS in present:
            raise RunError(f"{folder} contains {TEXTS} without its manifest", fix="write them again with --fresh")
        return False

    def _identity_of_journal(self) -> dict[str, Any] | None:
        """Returns the identity in the journal; None if a kill left less than its first line."""
        path = self.folder / PARTIAL_TEXTS
        identity = (read_record_header(path) or {}).get("identity")
        if isinstance(identity, dict):
            return identity
        if self._first_line().startswith(path.read_bytes()[:4096]):
            return None
        raise RunError(f"{path} is damaged (its first line cannot be read)", fix="write them again with --fresh")

    def _require_same(self, known: dict[str, Any]) -> None:
        differing = differing_fields(known, self.identity)
        if differing:
            raise RunError(f"{self.folder} contains other rollouts (they differ in: {differing})", fix=REPLACE)

    def _header(self) -> dict[str, Any]:
        return {"for": KIND, "identity": self.identity}

    def _first_line(self) -> bytes:
        return json.dumps(self._header(), sort_keys=True, allow_nan=False).encode() + b"\n"

    # ── texts so far ─────────────────────────────────────────────────────────────────────────────────────────────────
    def begin(self, rooms: list[int]) -> Bools:
        """Takes the folder over when the model is ready to write; returns which texts are finished.

        ``rooms`` says how many tokens each text may have.
        """
        path = self.folder / PARTIAL_TEXTS
        if self._fresh:
            write_atomically(path, self._first_line())
        for name in (ROLLOUTS, TEXTS):
            (self.folder / name).unlink(missing_ok=True)
        for left in self.folder.glob(TEMPORARY):
            left.unlink(missing_ok=True)
        self._records = RecordFile(path, self._header())
        done = np.zeros(len(rooms), np.bool_)
        for number, at, body in self._records.replay():
            try:
                is_possible = number < len(rooms) and not done[number] and len(unpack(body)[0]) <= rooms[number]
            except ValueError:
                is_possible = False
            if not is_possible:
                raise RunError(f"{path} cannot be resumed: it has a text that cannot be", fix="give --fresh")
            done[number], self._at[number] = True, at
        return done

    def add(self, number: int, ids: Ids, logprob: Floats, raw_logprob: Floats, finish: str) -> None:
        assert self._records is not None, "begin comes first"
        self._at[number] = self._records.append(number, pack(ids, logprob, raw_logprob, finish))

    def text(self, number: int) -> tuple[Ids, Floats, Floats, str]:
        assert self._records is not None, "begin comes first"
        return unpack(self._records.body(self._at[number], number))

    def save(self, blocks: Iterator[list[WrittenText]], manifest: dict[str, Any]) -> Rollouts:
        """Writes all texts and the manifest, removes the journal, and returns the rollouts."""
        with written_atomically(self.folder / TEXTS) as file:
            write_texts(file, blocks)
        whole = {"format": FORMAT, **manifest, "texts_sha256": file_sha256(self.folder / TEXTS)}
        whole = sealed(json.loads(readable(json.dumps(whole, ensure_ascii=False, allow_nan=False))))
        write_atomically(self.folder / ROLLOUTS, json.dumps(whole, indent=1).encode())
        (self.folder / PARTIAL_TEXTS).unlink(missing_ok=True)
        return Rollouts.open(self.folder)
