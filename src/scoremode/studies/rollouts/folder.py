"""Folders of rollouts while texts are written: one process at a time, and every finished text kept at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from scoremode.core.disk.files import file_sha256, written_atomically
from scoremode.core.disk.folders import PARTIAL_TEXTS, ROLLOUTS, TEXTS
from scoremode.core.store.resumable import ResumableFolder
from scoremode.errors import RunError
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


class RolloutsFolder(ResumableFolder[Rollouts]):
    """A folder for rollouts: inside a ``with`` block, its finished rollouts, or else the right to write there."""

    kind, manifest, journal, others = "rollouts", ROLLOUTS, PARTIAL_TEXTS, {TEXTS: has_texts}
    what, other = "a folder of rollouts", "other rollouts (they differ in: {})"
    replace = "give another --out, or --fresh to replace them"
    again = "write them again with --fresh"

    def _read_manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

    def _open(self, manifest: dict[str, Any]) -> Rollouts:
        found = Rollouts.open(self.folder)
        (self.folder / PARTIAL_TEXTS).unlink(missing_ok=True)  # a process was killed just before it did this
        return found

    # ── texts so far ─────────────────────────────────────────────────────────────────────────────────────────────────
    def begin(self, rooms: list[int]) -> Bools:
        """Takes the folder over when the model is ready to write; returns which texts are finished.

        ``rooms`` says how many tokens each text may have.
        """
        self._at = dict[int, int]()  # where the record of each finished text is
        records = self._open_journal()
        done = np.zeros(len(rooms), np.bool_)
        for number, at, body in records.replay():
            try:
                is_possible = number < len(rooms) and not done[number] and len(unpack(body)[0]) <= rooms[number]
            except ValueError:
                is_possible = False
            if not is_possible:
                raise RunError(f"{records.path} cannot be resumed: it has a text that cannot be", fix="give --fresh")
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
        self._write_manifest(whole)
        (self.folder / PARTIAL_TEXTS).unlink(missing_ok=True)
        return Rollouts.open(self.folder)
