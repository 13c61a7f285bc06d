"""Run folders: which process may write into one, and which files it contains.

DIR/partial.journal   while scoring: the scores so far (journal.py); written first, it identifies the run
DIR/scores.parquet    one row per target
DIR/manifest.json     what was scored, how, and the metrics; has the sha256 of scores.parquet and a seal
DIR/.lock             while a process writes here

How they are written, resumed and replaced is the same for every result: resumable.py. A reference has further files
(references/writer.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scoremode.core.disk.files import file_sha256, written_atomically
from scoremode.core.disk.folders import JOURNAL, LOCK, MANIFEST, ROWS, SCORES, Mark, is_reference_file
from scoremode.core.disk.records import identity_in
from scoremode.core.disk.stores import is_there, store_of
from scoremode.core.disk.uri import RemotePath, stored_at
from scoremode.core.references.format import discard, is_part
from scoremode.core.scores import journal, parquet
from scoremode.core.scores.columns import Divergences, Scores, TargetFacts
from scoremode.core.store.resumable import WAITING, Resumable, lock_folder
from scoremode.core.store.run import AGAIN, FORMAT, Run, RunManifest, read_run_manifest, require_columns
from scoremode.core.typed import typed

__all__ = ["FORMAT", "JOURNAL", "LOCK", "MANIFEST", "SCORES", "WAITING", "Claim", "is_run", "load", "lock_folder"]


class Claim(Resumable[Run]):
    """A folder for one run: inside a ``with`` block, its finished run, or else the right to write there."""

    what, other, again = "a run", "another run (it differs in: {})", AGAIN
    manifest, form, format = MANIFEST, RunManifest, FORMAT
    journal, header = JOURNAL, journal.HEADER

    def _data(self) -> dict[str, Mark]:
        names = filter(is_reference_file, os.listdir(self.folder)) if self.folder.is_dir() else ()
        return {SCORES: parquet.is_column_file, **dict.fromkeys(names, is_part)}

    def _read_manifest(self) -> Mapping[str, Any]:
        return read_run_manifest(self.folder)

    def _open(self, manifest: Mapping[str, Any]) -> Run:
        require_columns(self.folder / SCORES, manifest)
        return replace(_opened(self.folder, manifest), cached=True)

    def _discard(self, *, fresh: bool) -> None:
        self._remove(MANIFEST, SCORES)
        if fresh or identity_in(self.folder / ROWS) != self.identity:  # else it is this run's own reference
            discard(self.folder)

    def save(self, rows: parquet.RunRows, manifest: Mapping[str, Any]) -> Run:
        """Write the columns, then the manifest; then remove the journals."""
        columns = self.folder / SCORES
        with written_atomically(columns) as file:
            parquet.write(file, rows)
        facts = {"scores_sha256": file_sha256(columns), "targets": len(rows.scores)}
        return _opened(self.folder, self.finish({"format": FORMAT, **manifest, **facts}))

    def copy(self, run: Run, *without: str) -> Run:
        """Save a run with the same scores under this identity, leave out fields of its manifest, and publish it."""
        self.begin()
        assert run.path is not None, "a run that is kept"
        with written_atomically(self.folder / SCORES) as file, (Path(run.path) / SCORES).open("rb") as scores:
            shutil.copyfileobj(scores, file)
        manifest = {name: value for name, value in run.manifest.items() if name not in without}
        return self.publish(_opened(self.folder, self.finish({**manifest, "identity": self.identity})))

    def _remove_journal(self) -> None:
        self._remove(ROWS, JOURNAL)

    def check_reference(self) -> None:
        """Raise RunError if files of the finished reference were cut or edited since."""
        from scoremode.core.references.reader import Reference

        Reference.open(self.folder)

    def publish(self, run: Run) -> Run:
        """Bring the finished run to the place that the user named; a local folder is that place already."""
        return run


# ── finished runs ────────────────────────────────────────────────────────────────────────────────────────────────────
def is_run(folder: str | Path | RemotePath) -> bool:
    """Does the folder contain a finished run?"""
    return is_there(folder, MANIFEST)


@typed
def load(folder: str | Path | RemotePath) -> Run:
    """Load a finished run from a folder or a URI; RunError if its seal or its hash does not match.

    >>> load("runs/base").perplexity            # doctest: +SKIP
    >>> load("s3://bucket/runs/base").kl        # doctest: +SKIP
    """
    where = stored_at(folder)
    path = store_of(where).copy_of_run(where) if isinstance(where, RemotePath) else where
    manifest = read_run_manifest(path)
    require_columns(path / SCORES, manifest)
    return replace(_opened(path, manifest), path=str(where))


def _opened(folder: Path, manifest: Mapping[str, Any]) -> Run:
    """The run in a folder; its columns are read on demand."""
    stored = parquet.ColumnFile(folder / SCORES)
    return Run(
        plan_digest=manifest["plan_digest"],
        scores=Scores.on_disk(stored),
        facts=TargetFacts.on_disk(stored),
        manifest=manifest,
        path=str(folder),
        divergences=Divergences.on_disk(stored),
    )
