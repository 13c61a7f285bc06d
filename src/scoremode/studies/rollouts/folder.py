"""Folders of rollouts while texts are written: one process at a time, and every finished text kept at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from scoremode.core.disk.files import file_sha256, written_atomically
from scoremode.core.disk.folders import PARTIAL_TEXTS, ROLLOUTS, TEXTS, Mark
from scoremode.core.disk.records import RecordFile
from scoremode.core.store.resumable import Resumable
from scoremode.errors import RunError
from scoremode.studies.rollouts.texts import (
    FORMAT,
    ManifestForm,
    Rollouts,
    has_texts,
    pack,
    unpack,
    write_texts,
)
from scoremode.values import Bools, Floats, Ids


class RolloutsFolder(Resumable[Rollouts]):
    """A folder for rollouts: inside a ``with`` block, its finished rollouts, or else the right to write there."""

    what, other = "a folder of rollouts", "other rollouts (they differ in: {})"
    replace = "give another --out, or --fresh to replace them"
    again = "write them again with --fresh"
    manifest, form, format = ROLLOUTS, ManifestForm, FORMAT
    journal, header = PARTIAL_TEXTS, {"for": "rollouts"}

    def _data(self) -> Mapping[str, Mark]:
        return {TEXTS: has_texts}

    def _open(self, manifest: dict[str, Any]) -> Rollouts:
        return Rollouts.open(self.folder)

    # ── texts so far ─────────────────────────────────────────────────────────────────────────────────────────────────
    def begin_texts(self, rooms: list[int]) -> Bools:
        """Takes the folder over when the model is ready to write; returns which texts are finished.

        ``rooms`` says how many tokens each text may have.
        """
        self.begin()
        self.records: RecordFile = self.open_journal()
        self._at = dict[int, int]()  # where the record of each finished text is
        done = np.zeros(len(rooms), np.bool_)
        for number, at, body in self.records.replay():
            try:
                is_possible = number < len(rooms) and not done[number] and len(unpack(body)[0]) <= rooms[number]
            except ValueError:
                is_possible = False
            if not is_possible:
                raise RunError(f"{self.records.path} cannot be resumed: it has a text that cannot be", fix=self.again)
            done[number], self._at[number] = True, at
        return done

    def add(self, number: int, ids: Ids, logprob: Floats, raw_logprob: Floats, finish: str) -> None:
        self._at[number] = self.records.append(number, pack(ids, logprob, raw_logprob, finish))

    def text(self, number: int) -> tuple[Ids, Floats, Floats, str]:
        return unpack(self.records.body(self._at[number], number))

    def save(self, blocks: Iterator[list[dict[str, Any]]], manifest: dict[str, Any]) -> Rollouts:
        """Writes all texts and the manifest, removes the journal, and returns the rollouts."""
        with written_atomically(self.folder / TEXTS) as file:
            write_texts(file, blocks)
        self.finish({"format": FORMAT, **manifest, "texts_sha256": file_sha256(self.folder / TEXTS)})
        return Rollouts.open(self.folder)
