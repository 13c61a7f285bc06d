"""Run folders: which process may write into one, and which files it contains.

DIR/partial.journal   while scoring: the scores so far (journal.py); written first, it identifies the run
DIR/scores.parquet    one row per target
DIR/manifest.json     what was scored, how, and the metrics; has the sha256 of scores.parquet and a seal
DIR/.lock             while a process writes here

Files are written in this order: journal, columns, manifest; then the journal is removed. With --fresh, a new journal
replaces the old one; then the manifest is removed, then the columns, then a reference's files. So after a kill the
folder always contains a complete run, or a journal of the run that is being scored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from scoremode.core.cache.entries import is_cached, mark_used
from scoremode.core.cache.eviction import cache_limit, make_room
from scoremode.core.disk.files import file_sha256, write_atomically, written_atomically
from scoremode.core.disk.folders import (
    JOURNAL,
    LOCK,
    MANIFEST,
    SCORES,
    Mark,
    is_reference_file,
    own_files,
)
from scoremode.core.disk.manifests import differing_fields, unusable_field
from scoremode.core.disk.stores import is_there, store_of
from scoremode.core.disk.uri import Place, stored_at
from scoremode.core.references.format import discard, identity_in, is_reference
from scoremode.core.references.reader import Reference
from scoremode.core.references.writer import SHARD_BYTES
from scoremode.core.scores import journal, parquet
from scoremode.core.scores.columns import Divergences, Scores, TargetFacts
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.store.resumable import WAITING, ResumableFolder, lock_folder, sealed_as_read
from scoremode.core.store.run import AGAIN, FORMAT, Run, RunManifest, read_run_manifest, require_columns
from scoremode.core.strict_json import read_object
from scoremode.errors import RunError

__all__ = ["FORMAT", "JOURNAL", "LOCK", "MANIFEST", "SCORES", "WAITING", "Claim", "is_run", "load", "lock_folder"]

Progress = Callable[[int, int], None]


# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Claim(ResumableFolder[Run]):
    """A folder for one run: inside a ``with`` block, its finished run, or else the right to write there.

    If another process holds the lock: RunError, or with ``waits`` a line on standard error; then this process waits
    and uses the run that the other one finished.
    """

    shard_bytes = SHARD_BYTES  # of a reference's files

    def __init__(self, folder: Path, identity: dict[str, Any], *, fresh: bool = False, waits: bool = False) -> None:
        super().__init__(folder, identity, fresh=fresh)
        self._waits = waits

    def __enter__(self) -> Self:
        super().__enter__()
        if self.finished is not None:
            self.release()
        return self

    def _take(self) -> Run | None:
        """Return the finished run in the folder; if there is none, lock the folder and return None."""
        folder, found = self.folder, None
        if is_cached(folder):
            cache_limit()  # raises if the limit is invalid, before anything is scored
        try:
            found = existing_run(folder, self.identity, fresh=self._fresh)  # raises before anything is created
        except RunError:
            if folder.exists() or not is_cached(folder):
                raise  # else the cache removed the folder at the same time
        if found is None:
            self._lock, has_waited = lock_folder(folder, waits=self._waits)
            if has_waited and self._fresh:
                with suppress(RunError):  # the run was scored while we waited, so it is new
                    found = finished_in(folder, self.identity)
            # again, because it may have changed before the lock
            found = found or existing_run(folder, self.identity, fresh=self._fresh)
        if found is not None:
            mark_used(folder)
        return found

    def begin(self) -> None:
        """Take over the folder for this run. Call it when the engine is open and ready to score.

        ``fresh`` removes the old run here and not earlier: if the engine does not start, the old run is not lost.
        """
        assert self._lock is not None, "the folder is not locked"
        fresh, self._fresh = self._fresh, False
        path, mine = self.folder / JOURNAL, journal.first_line(self.identity)
        if fresh or not path.exists() or journal.inspect_journal(path).identity != self.identity:
            write_atomically(path, mine)
        self._remove(MANIFEST, SCORES)
        if fresh or identity_in(self.folder) != self.identity:  # another run's, left by a process that was killed
            discard(self.folder)

    def check_reference(self) -> None:
        """Raise RunError if files of the finished reference were cut or edited since."""
        Reference.open(self.folder)

    def publish(self, run: Run) -> Run:
        """Bring the finished run to the place that the user named; a local folder is that place already."""
        return run


def existing_run(folder: Path, identity: dict[str, Any], *, fresh: bool) -> Run | None:
    """The finished run in a folder; None if this run may be scored into it; RunError if it may not."""
    present = _own_files(folder)
    if fresh:
        return None
    found = journal.inspect_journal(folder / JOURNAL) if JOURNAL in present else None
    replacing = found is not None and found.identity == identity
    if MANIFEST in present:
        try:
            return finished_in(folder, identity)
        except RunError:
            if not replacing:
                raise
            return None  # a process with --fresh was killed before it removed the old run
    if found is not None and not replacing:
        _require_no_other(folder, found, identity)
    if found is None and SCORES in present:
        raise RunError(f"{folder} contains {SCORES} without its manifest", fix=AGAIN)
    return None


def _require_no_other(folder: Path, found: journal.JournalFacts, identity: dict[str, Any]) -> None:
    """Refuse an unfinished run with another identity, unless it has no scores yet."""
    mine = journal.first_line(identity)
    if found.older:
        raise RunError(
            f"{folder} contains an unfinished run of another version of scoremode",
            fix="give another --out, or --fresh to score it again",
        )
    if found.begun is not None and (found.identity is not None or mine.startswith(found.begun)):
        return
    if found.identity is None:
        raise RunError(f"{folder / JOURNAL} is damaged (its first line cannot be read)", fix=AGAIN)
    require_same(folder, found.identity, identity)


def _own_files(folder: Path) -> set[str]:
    """The names of the files in the folder of a run or a reference. A user's notes beside them are left alone."""

    def is_manifest(path: Path) -> bool:
        with suppress(ValueError, OSError):
            return is_identity(read_object(path).get("identity"))
        return False

    marks: dict[str, Mark] = {
        MANIFEST: is_manifest,
        SCORES: lambda path: parquet.columns_problem(path) is None,
        JOURNAL: lambda path: journal.inspect_journal(path).ours,
    }
    names = filter(is_reference_file, os.listdir(folder)) if folder.is_dir() else ()
    marks |= dict.fromkeys(names, lambda _: is_reference(folder))
    return own_files(folder, "a run", marks, marks.keys() - {JOURNAL}, others_stay=True)


def is_identity(value: Any) -> bool:
    """Does this look like the identity of a run?"""
    return isinstance(value, dict) and {"model", "plan", "engine"} <= value.keys()


def finished_in(folder: Path, identity: dict[str, Any]) -> Run:
    run = load(folder)
    require_same(folder, dict(run.manifest["identity"]), identity)
    return replace(run, cached=True)


def require_same(folder: Path | Place, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = differing_fields(known, wanted)
    if differing:
        raise RunError(
            f"{folder} contains another run (it differs in: {differing})",
            fix="give another --out, or --fresh to replace it",
        )


# ── finished runs ────────────────────────────────────────────────────────────────────────────────────────────────────
def is_run(folder: str | Path | Place) -> bool:
    """Does the folder contain a finished run?"""
    return is_there(folder, MANIFEST)


def load(folder: str | Path | Place) -> Run:
    """Load a finished run from a folder or a URI; RunError if its seal or its hash does not match.

    >>> load("runs/base").perplexity            # doctest: +SKIP
    >>> load("s3://bucket/runs/base").kl        # doctest: +SKIP
    """
    where = stored_at(folder)
    path = store_of(where).copy_of_run(where)[0] if isinstance(where, Place) else where
    manifest = read_run_manifest(path)
    require_columns(path / SCORES, manifest)
    return replace(_opened(path, manifest), path=str(where))


def _opened(folder: Path, manifest: dict[str, Any]) -> Run:
    """The run in a folder; its columns are read on demand."""
    stored = parquet.ColumnFile(folder / SCORES)
    if stored.rows != manifest["targets"]:
        raise RunError(f"{stored.path} has {stored.rows} rows instead of {manifest['targets']}", fix=AGAIN)
    if stored.not_measured & set(BUILT_IN.names) != set(manifest.get("not_measured", ())):
        raise RunError(f"the measured columns of {stored.path} are not those of its manifest", fix=AGAIN)
    wrong = BUILT_IN.impossible_value(
        {name: stored.extremes(name) for name in BUILT_IN.names if name not in stored.not_measured}
    )
    if wrong is not None:
        raise RunError(f"{stored.path} cannot be right: {wrong}", fix=AGAIN)
    return Run(
        plan_digest=manifest["plan_digest"],
        scores=Scores.on_disk(stored),
        facts=TargetFacts.on_disk(stored),
        manifest=manifest,
        path=str(folder),
        divergences=Divergences.on_disk(stored),
    )


def save(folder: Path, blocks: Iterable[parquet.Rows], manifest: dict[str, Any], targets: int) -> Run:
    """Write the columns, then the manifest with its seal; then remove the journal."""
    with written_atomically(folder / SCORES) as file:
        parquet.write(file, blocks)
    sha256 = file_sha256(folder / SCORES)
    whole = {"format": FORMAT, **manifest, "scores_sha256": sha256, "targets": targets}
    whole = sealed_as_read(whole)
    wrong = unusable_field(whole, RunManifest)
    assert wrong is None, f"an invalid manifest: no usable {wrong}"
    write_atomically(folder / MANIFEST, json.dumps(whole, indent=1).encode())
    (folder / JOURNAL).unlink(missing_ok=True)
    run = _opened(folder, whole)
    make_room(folder)
    return run
