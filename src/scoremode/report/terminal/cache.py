"""The cache as lines for a terminal: one line per entry, aligned, never folded, so that grep finds whole lines."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scoremode.cache.units import age_words, counts_in_words, size_words
from scoremode.report.text import shown

LONGEST_ID = 16  # characters of a fingerprint that are shown
HEADER = ("entry", "size", "last use", "state", "")
RESUMES = "unfinished, resumes"


def cache_lines(found: dict[str, Any]) -> list[str]:
    """What ``scoremode cache`` prints."""
    rows = [HEADER, *(_row(entry) for entry in found["entries"])] if found["entries"] else []
    limit = "no limit" if found["limit"] is None else f"limit {size_words(found['limit'])}"
    total = [
        f"{_counted(kind, total['entries'])}, {size_words(total['size'])}" for kind, total in found["totals"].items()
    ]
    where = f"{shown(found['folder'])}: {size_words(found['size'])}, {limit} for runs, references and texts"
    return [*_aligned(rows), *([""] if rows else []), *total, where]


def prune_lines(found: dict[str, Any]) -> list[str]:
    """What ``scoremode cache prune`` prints."""
    kinds = Counter(entry["kind"] for entry in found["removed"])
    verb = "would remove" if found["dry_run"] else "removed"
    freed = f" ({size_words(found['freed'])})" if kinds else ""
    skipped = [f"skipped {shown(entry['path'])}: {shown(entry['reason'])}" for entry in found["skipped"]]
    done = f"{verb} {counts_in_words(dict(kinds))}{freed}; {size_words(found['left'])} left"
    return [*_aligned([_row(entry) for entry in found["removed"]]), *skipped, done]


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    used = f"{age_words(entry['age_seconds'])} ago"
    size = "-" if entry["state"] == "foreign" else size_words(entry["size"])
    resumes = entry["state"] == "unfinished" and entry["kind"] in ("runs", "references")
    state = RESUMES if resumes else entry["state"]
    return shown(entry["path"]), size, used, state, shown(_what(entry))


def _what(entry: dict[str, Any]) -> str:
    parts = [_short(entry.get(name)) for name in ("what", "model", "against", "corpus", "method", "engine")]
    parts[2] = parts[2] and f"against {parts[2]}"
    targets = entry.get("targets")
    parts += [f"{targets:,} targets" if targets is not None else None, entry["note"]]
    return ", ".join(part for part in parts if part)


def _short(text: str | None) -> str | None:
    """The start of a fingerprint; names are shown in full."""
    hexadecimal = text is not None and len(text) > LONGEST_ID and not set(text.split(":")[-1]) - set("0123456789abcdef")
    return f"{text[:LONGEST_ID]}…" if text is not None and hexadecimal else text


def _counted(kind: str, number: int) -> str:
    return counts_in_words({"other files" if kind == "other" else kind: number})


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
