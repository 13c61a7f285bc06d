"""``scoremode cache``: lists the entries of the cache folder, and removes old entries or as many as exceed a size."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from scoremode.core.cache.entries import KINDS, Entry, cache_limit, entries, evict, mark_of
from scoremode.core.cache.units import moment, parse_age, parse_size
from scoremode.core.disk.folders import ABOUT, cache_folder
from scoremode.core.disk.manifests import is_line
from scoremode.core.strict_json import read_object
from scoremode.core.typed import typed
from scoremode.errors import OptionError, did_you_mean, readable

NAMES = ("source", "place", "model", "baseline", "corpus", "method", "engine")  # fields of manifests that are shown
HOW_MUCH = "give --older-than 30d, --larger-than 10GB or both"


@typed
def cache(
    action: str | None = None,
    *,
    kind: str | Collection[str] = (),
    older_than: str | float | None = None,
    larger_than: str | int | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Lists the cache folder; with ``action="prune"`` it removes entries instead, unless ``dry_run``.

    Entries go if they were not used for ``older_than`` (``"30d"``, or seconds), and the least recently used until
    the rest is at most ``larger_than`` (``"10GB"``, or bytes). ``kind`` is ``"runs"``, ``"references"``, … or several.

    >>> cache("prune", larger_than="1TB", dry_run=True)["removed"]
    []
    """
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    for name in kinds:
        if name not in KINDS:
            raise OptionError(f"the cache has no kind '{name}'", fix=did_you_mean(name, KINDS))
    if action not in (None, "prune"):
        raise OptionError(f"scoremode cache has no '{action}'", fix=did_you_mean(str(action), ["prune"]))
    root, now = cache_folder(), time.time()
    if action is None:
        flags = {"--older-than": older_than, "--larger-than": larger_than, "--dry-run": dry_run or None}
        for flag, value in flags.items():
            if value is not None:
                raise OptionError(f"{flag} belongs to prune", fix=f"type scoremode cache prune {flag} …")
        return _listed(root, now, kinds)
    try:
        age = parse_age(older_than) if isinstance(older_than, str) else older_than
        size = parse_size(larger_than) if isinstance(larger_than, str) else larger_than
    except ValueError as error:
        raise OptionError(str(error), fix=HOW_MUCH) from None
    for name, value in (("--older-than", age), ("--larger-than", size)):
        if value is not None and value < 0:
            raise OptionError(f"{name} {value} is negative", fix=HOW_MUCH)
    if age is None and size is None:
        raise OptionError("prune was not told what to remove", fix=HOW_MUCH)
    json_by_entry = {entry: _as_json(entry, root, now) for entry in entries(root, kinds or KINDS)}
    outcome = evict(json_by_entry, older_than=age, larger_than=size, dry_run=dry_run)  # skips what another process uses
    return {
        "folder": readable(str(root)),
        "dry_run": dry_run,
        "removed": [json_by_entry[entry] for entry in outcome.removed],
        "skipped": [{**json_by_entry[entry], "reason": reason} for entry, reason in outcome.skipped],
        "freed": outcome.freed,
        "left": outcome.left,
    }


def _listed(root: Path, now: float, kinds: Collection[str]) -> dict[str, Any]:
    """All that ``scoremode cache`` prints, newest use first. Nothing is hashed and no columns are opened."""
    newest_first = sorted(entries(root, kinds or KINDS), key=lambda entry: (-entry.used, str(entry.path)))
    totals = {kind: [e.size for e in newest_first if e.kind == kind] for kind in KINDS}
    return {
        "folder": readable(str(root)),
        "limit": cache_limit(),
        "size": sum(entry.size for entry in newest_first),
        "totals": {kind: {"entries": len(sizes), "size": sum(sizes)} for kind, sizes in totals.items() if sizes},
        "entries": [_as_json(entry, root, now) for entry in newest_first],
    }


def _contents(entry: Entry) -> str:
    """Describes an entry by its manifest. Nothing is hashed, so an edit is not noticed."""
    mark = mark_of(entry.path)
    if not mark.exists():
        return ": ".join(filter(None, ["unfinished", _named(entry.path / ABOUT)]))
    return f"{mark.name} cannot be read" if (names := _named(mark)) is None else names


def _named(file: Path) -> str | None:
    """What a manifest, or the note in an unfinished entry, names; None if it cannot be read."""
    try:
        manifest = read_object(file)
    except (OSError, ValueError):
        return None
    manifest |= manifest["facts"] if isinstance(manifest.get("facts"), dict) else {}  # of an attribution
    return ", ".join(manifest[name] for name in NAMES if is_line(manifest.get(name)))


def _as_json(entry: Entry, root: Path, now: float) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "path": readable(str(entry.path.relative_to(root))),
        "size": entry.size,
        "used": moment(entry.used).isoformat(timespec="seconds"),
        "age_seconds": round(max(0.0, now - entry.used)),
        "contents": _contents(entry),
    }
