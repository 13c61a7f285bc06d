"""``scoremode cache``: lists the entries of the cache folder, and removes old entries or as many as exceed a size."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from scoremode.cache.entries import (
    DAMAGED,
    FINISHED,
    KINDS,
    OUTDATED,
    UNFINISHED,
    Entry,
    entries,
    mark_of,
    other_entries,
)
from scoremode.cache.eviction import cache_limit, evict
from scoremode.cache.units import moment
from scoremode.disk.folders import JOURNAL, MANIFEST, PLACE, cache_folder
from scoremode.disk.manifests import is_line
from scoremode.disk.records import read_record_header
from scoremode.errors import OptionError, harmless
from scoremode.store.run import FORMAT
from scoremode.strict_json import read_object


def list_cache(kinds: Collection[str] = ()) -> dict[str, Any]:
    """Returns all that ``scoremode cache`` prints, newest use first. Nothing is hashed and no columns are opened.

    >>> sorted(list_cache())
    ['entries', 'folder', 'limit', 'size', 'totals']
    """
    root, now = cache_folder(), time.time()
    found = [described(entry) for entry in chain(entries(root, kinds or KINDS), () if kinds else other_entries(root))]
    found.sort(key=lambda entry: (-entry.used, str(entry.path)))
    totals = {kind: [e for e in found if e.kind == kind] for kind in (*KINDS, "other")}
    return {
        "folder": _printable(root),
        "limit": cache_limit(),
        "size": sum(entry.size for entry in found),
        "totals": {
            kind: {"entries": len(some), "size": sum(e.size for e in some)} for kind, some in totals.items() if some
        },
        "entries": [_as_json(entry, root, now) for entry in found],
    }


def prune_cache(
    *,
    older_than: float | None = None,
    larger_than: int | None = None,
    kinds: Collection[str] = (),
    dry_run: bool = False,
) -> dict[str, Any]:
    """Removes entries unused for ``older_than`` seconds, then the least recently used beyond ``larger_than`` bytes.

    With ``kinds``, only entries of those kinds are counted and removed. Entries that another process uses are skipped.
    """
    if older_than is None and larger_than is None:
        raise OptionError("prune was not told what to remove", fix="give --older-than 30d, --larger-than 10GB or both")
    root, now = cache_folder(), time.time()
    found = [described(entry) for entry in entries(root, kinds or KINDS)]
    outcome = evict(found, older_than=older_than, larger_than=larger_than, dry_run=dry_run)
    return {
        "folder": _printable(root),
        "dry_run": dry_run,
        "removed": [_as_json(entry, root, now) for entry in outcome.removed],
        "skipped": [{**_as_json(entry, root, now), "reason": reason} for entry, reason in outcome.skipped],
        "freed": outcome.freed,
        "left": outcome.left,
    }


# ── describe ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def described(entry: Entry) -> Entry:
    """Returns the entry with the facts in its manifest or journal. Nothing is hashed, so an edit is not noticed."""
    mark, is_run = mark_of(entry.path), entry.kind in ("runs", "references")
    try:
        if is_run and entry.state == UNFINISHED:
            return _described_by_journal(entry)
        if entry.state != FINISHED:
            return entry
        if entry.kind == "tasks":
            return replace(entry, state=OUTDATED, note="nothing reads it any more")
        return _described_run(entry, read_object(mark)) if is_run else replace(entry, facts=_facts(entry, mark))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return replace(entry, state=DAMAGED, note=harmless(f"{mark.name}: {reason}"))


def _facts(entry: Entry, mark: Path) -> dict[str, Any]:
    """Returns the facts of a finished entry that is not a run."""
    if entry.kind == "attributions":
        found = read_object(mark)
        of = {"model": found.get("baseline"), **_texts(found.get("facts"), "corpus", "engine")}
        return {"what": "units of candidates", **_texts(of, "model", "corpus", "engine")}
    if entry.kind == "texts":
        return {"what": "tokens", **_texts(read_object(mark).get("key"), "corpus")}
    if entry.kind == "files" and (entry.path / PLACE).exists():
        return {"what": "results that go elsewhere"}
    if entry.kind == "files":
        place = read_object(mark).get("place")
        return {"what": f"copy of {place}"} if is_line(place) else {}
    return entry.facts


def _described_run(entry: Entry, manifest: dict[str, Any]) -> Entry:
    known = manifest.get("format")
    if type(known) is not int or not isinstance(manifest.get("identity"), dict):
        return replace(entry, state=DAMAGED, note=f"{MANIFEST}: not a run's")
    if known != FORMAT:
        return replace(entry, state=OUTDATED, note=f"written in format {known}, this scoremode reads {FORMAT}")
    targets, against = manifest.get("targets"), _texts(manifest.get("against"), "model")["model"]
    facts = {**_texts(manifest, "model", "corpus", "method", "engine", "dtype"), "against": against}
    return replace(entry, facts={**facts, "targets": targets if type(targets) is int else None})


def _described_by_journal(entry: Entry) -> Entry:
    """Returns the entry with its run's identity, which has fingerprints but no names."""
    path = entry.path / JOURNAL
    if not path.exists():
        return replace(entry, note="nothing was scored yet")
    identity = (read_record_header(path) or {}).get("identity")
    if not isinstance(identity, dict):
        return replace(entry, state=DAMAGED, note=f"{JOURNAL}: its first line cannot be read")
    return replace(entry, facts=_texts(identity, "model", "corpus", "engine"))


def _texts(found: Any, *names: str) -> dict[str, str | None]:
    """Returns the named fields of an object; fields without printable text are None, because files are not trusted."""
    known = found if isinstance(found, Mapping) else {}
    return {name: known[name] if is_line(known.get(name)) else None for name in names}


def _as_json(entry: Entry, root: Path, now: float) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "path": _printable(entry.path.relative_to(root)),
        "size": entry.size,
        "used": moment(entry.used).isoformat(timespec="seconds"),
        "age_seconds": round(max(0.0, now - entry.used)),
        "state": entry.state,
        "note": entry.note or None,
        **entry.facts,
    }


def _printable(path: Path) -> str:
    """Converts a path to text that can be printed anywhere, because names on disk need not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")
