"""``scoremode cache``: what is kept in the cache folder, and removing what is old or too much."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

from scoremode.errors import OptionError
from scoremode.store.cache import cache_folder, cache_limit
from scoremode.store.entries import KINDS, Entry, described, entries, other_entries
from scoremode.store.eviction import evict
from scoremode.store.units import moment


def list_cache(kinds: Collection[str] = ()) -> dict[str, Any]:
    """Everything that ``scoremode cache`` prints, newest use first. Nothing is hashed and no columns are opened.

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
    """Remove what was not used for ``older_than`` seconds, then the least recently used beyond ``larger_than`` bytes.

    Without ``kinds`` all of them are counted and removed; else only those. What another process holds is skipped.
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
    """A path as text that any output takes: names on disk need not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")
