"""Run folders: scores.parquet, then manifest.json, written last; its presence means complete.

DIR/partial.journal   while scoring: what is done so far (journal.py)
DIR/scores.parquet    one row a target
DIR/manifest.json     what was scored, by whom, how, and the numbers; holds the sha256 of scores.parquet
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scoremode import columns, references
from scoremode.cache import cache_folder, file_sha256, write_atomically
from scoremode.errors import RunError
from scoremode.journal import read_identity, require_unlocked
from scoremode.types import Run, Scores, TargetFacts

FORMAT = 1
MANIFEST, SCORES, JOURNAL = "manifest.json", "scores.parquet", "partial.journal"
OURS = {MANIFEST, SCORES, JOURNAL}
REQUIRED = {
    "identity",
    "metrics",
    "plan_digest",
    "scores_sha256",
    "targets",
    "windows",
    "forward_tokens",
    "tokens",
    "coverage",
    "method",
    "method_settings",
    "notes",
    "stderr_groups",
    "corpus",
    "corpus_bytes",
    "corpus_sha256",
    "model",
    "engine",
    "dtype",
    "device",
    "head",
    "seconds",
    "tokens_per_second",
}


def default_folder(identity: dict[str, Any]) -> Path:
    """Where a run goes that was given no folder: the same question finds the same place again."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "runs" / digest[:20]


def claim(folder: Path, identity: dict[str, Any], *, fresh: bool) -> Run | None:
    """Make the folder ready for this run, or give the finished run that is already in it.

    A folder that holds something else is never touched, unless it is an older run and ``fresh`` says to replace it.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file", fix="give a folder to --out")
    present = {p.name for p in folder.iterdir() if not p.name.startswith(".")} if folder.exists() else set()
    if present:
        _require_ours(folder, present)
    if fresh:
        if JOURNAL in present:
            require_unlocked(folder / JOURNAL)
        for name in OURS:
            (folder / name).unlink(missing_ok=True)
        references.discard(folder)
        present = set()
    if MANIFEST in present:
        return _finished(folder, identity)
    if JOURNAL in present:
        known = read_identity(folder / JOURNAL)
        if known is not None:
            _require_same(folder, known, identity)
    _make(folder)
    return None


def _require_ours(folder: Path, present: set[str]) -> None:
    """Refuse a folder that anything but scoremode wrote, so that nobody's file is ever overwritten.

    A manifest that a crash or a disk damaged is still ours where nothing but our own names stands beside it.
    """
    foreign = sorted(name for name in present - OURS if not references.is_own_name(name))
    manifest, journal = folder / MANIFEST, folder / JOURNAL
    known = (MANIFEST in present and _looks_ours(_parsed(manifest))) or (
        JOURNAL in present and _looks_ours({"identity": read_identity(journal)})
    )
    known = known or references.is_reference(folder)  # killed before its journal was begun
    torn = not foreign and (
        (MANIFEST in present and SCORES in present) or (JOURNAL in present and journal.stat().st_size == 0)
    )
    if not known and not torn:
        name = foreign[0] if foreign else sorted(present)[0]
        raise RunError(f"{folder} is not a run: it holds {name}", fix="give a new or empty folder to --out")


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, OSError):
        return None


def _looks_ours(value: Any) -> bool:
    identity = value.get("identity") if isinstance(value, dict) else None
    return isinstance(identity, dict) and {"model", "plan", "engine"} <= identity.keys()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made ({error.strerror})", fix="give another --out") from None


def _finished(folder: Path, identity: dict[str, Any]) -> Run:
    run = load(folder)
    _require_same(folder, dict(run.manifest["identity"]), identity)
    return Run(run.plan_digest, run.scores, run.facts, run.manifest, run.path, cached=True, kl=run.kl)


def _require_same(folder: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = sorted(k for k in known.keys() | wanted.keys() if known.get(k) != wanted.get(k))
    if differing:
        raise RunError(
            f"{folder} holds another run (it differs in: {', '.join(differing)})",
            fix="give another --out, or --fresh to replace it",
        )


def is_run(folder: str | Path) -> bool:
    """Does a finished run lie there?"""
    return (Path(folder) / MANIFEST).is_file()


def load(folder: str | Path) -> Run:
    """A finished run, checked against its own hashes.

    >>> load("runs/base").perplexity   # doctest: +SKIP
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    path = folder / SCORES
    if not path.exists() or file_sha256(path) != manifest["scores_sha256"]:
        raise RunError(f"{path} is missing or was changed after the run", fix="score again with --fresh")
    return _opened(folder, manifest)


def _opened(folder: Path, manifest: dict[str, Any]) -> Run:
    """The run of a folder whose columns stay on disk until they are asked for; but for KL, which comparisons need."""
    stored = columns.ColumnFile(folder / SCORES)
    if stored.rows != manifest["targets"]:
        raise RunError(
            f"{stored.path} has {stored.rows} rows instead of {manifest['targets']}", fix="score again with --fresh"
        )
    return Run(
        plan_digest=manifest["plan_digest"],
        scores=Scores.on_disk(stored),
        facts=TargetFacts.on_disk(stored),
        manifest=manifest,
        path=str(folder),
        kl=stored.read("kl") if "kl" in stored.names else None,
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        if (folder / JOURNAL).exists():
            raise RunError(f"{folder} holds an unfinished run", fix="repeat the command that began it; it goes on")
        raise RunError(f"{folder} is not a run", fix="give a folder that was written with --out")
    try:
        manifest = json.loads(path.read_bytes())
        known = manifest["format"]
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path} is damaged", fix="score again with --fresh") from None
    if known != FORMAT:
        raise RunError(f"{folder} was written in format {known}, this scoremode reads {FORMAT}", fix="score again")
    missing = REQUIRED - manifest.keys()
    if missing:
        raise RunError(f"{path} lacks {', '.join(sorted(missing))}", fix="score again with --fresh")
    return dict(manifest)


def save(folder: Path, blocks: Iterable[columns.Rows], manifest: dict[str, Any], targets: int) -> Run:
    """Write the columns, then the manifest, then drop the journal."""
    columns.write(folder / SCORES, blocks)
    manifest = {
        "format": FORMAT,
        **manifest,
        "scores_sha256": file_sha256(folder / SCORES),
        "targets": targets,
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())
    (folder / JOURNAL).unlink(missing_ok=True)
    return _opened(folder, manifest)


def summary(run: Run) -> dict[str, Any]:
    """The facts that ``--json`` prints: numbers first, then what makes them reproducible."""
    manifest, metrics = run.manifest, run.manifest["metrics"]
    numbers: dict[str, Any] = {"perplexity": metrics["perplexity"]["value"], "mean_nll": metrics["mean_nll"]["value"]}
    for name in metrics:
        numbers[name] = metrics[name]["value"]
        numbers[f"{name}_stderr"] = metrics[name]["stderr"]
    rest = {k: v for k, v in manifest.items() if k not in ("metrics", "identity", "format", "scores_sha256")}
    return {**numbers, **rest, "cached": run.cached, "run": run.path}
