"""Remove entries of the cache: old ones, or the least recently used beyond its size limit, never one that is in use.

An entry is locked, inspected again and renamed to KIND/.removed-NAME-TOKEN; then its files are deleted. If the process
is killed, the entry is either complete under its own name, or is removed by a later removal as one of its age.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from scoremode.core.cache.entries import Entry, entries, inspect_entry, is_cached, mark_of
from scoremode.core.cache.units import counts_in_words, moment, parse_size, size_words
from scoremode.core.disk.folders import LOCK, cache_folder
from scoremode.core.disk.locks import Lock, open_locked
from scoremode.errors import OptionError, RunError, print_line

DEFAULT_LIMIT = 50 * 10**9
LIMITED = ("references", "runs", "attributions", "texts", "files", "tokenizers")  # what the limit applies to
FILLED_AFTER_REMOVAL = 0.9  # share of the limit that stays filled, so that not every run causes another removal
IN_USE = "another process is using it"
CHANGED = "it was used just now"
GONE = "another process removed it"


@dataclass(slots=True)
class Outcome:
    """What a removal did, or would do."""

    removed: list[Entry] = field(default_factory=list)
    skipped: list[tuple[Entry, str]] = field(default_factory=list)  # with the reason
    left: int = 0  # bytes of the remaining entries

    @property
    def freed(self) -> int:
        return sum(entry.size for entry in self.removed)


def evict(
    found: Iterable[Entry], *, older_than: float | None = None, larger_than: int | None = None, dry_run: bool = False
) -> Outcome:
    """Remove entries not used for ``older_than`` seconds, then the least recently used beyond ``larger_than`` bytes."""
    waiting, now = sorted(found, key=lambda entry: entry.used), time.time()
    outcome = Outcome(left=sum(entry.size for entry in waiting))
    for entry in waiting:
        old = older_than is not None and max(0.0, now - entry.used) >= older_than
        if not old and (larger_than is None or outcome.left <= larger_than):
            continue
        reason = remove(entry, dry_run=dry_run)
        if reason is None:
            outcome.removed.append(entry)
        else:
            outcome.skipped.append((entry, reason))
        if reason in (None, GONE):
            outcome.left -= entry.size
    return outcome


def remove(entry: Entry, *, dry_run: bool = False) -> str | None:
    """Remove an entry; return the reason if it was not removed."""
    try:
        if entry.kind == "logs":
            if not dry_run:
                entry.path.unlink()
            return None
        with ExitStack() as held:
            reason = _take(entry, held, dry_run=dry_run)
            if reason is not None or dry_run:
                return reason
            away = entry.path.with_name(f".removed-{entry.path.name.lstrip('.')}-{secrets.token_hex(8)}")
            entry.path.rename(away)
        shutil.rmtree(away, ignore_errors=True)
        return "not all of it could be deleted" if away.exists() else None
    except (OSError, RunError) as error:  # Lock raises RunError
        if not os.path.lexists(entry.path):
            return GONE
        return f"it cannot be removed ({error.strerror})" if isinstance(error, OSError) else error.message


def _take(entry: Entry, held: ExitStack, *, dry_run: bool) -> str | None:
    """Lock the entry and inspect it again, because it may have changed; return the reason if it must stay."""
    lock = Lock(entry.path / LOCK)
    # a dry run creates no lock file: if there is none, no process holds the lock
    if not (_lock_existing(lock.path, held) if dry_run else lock.acquire()):
        return IN_USE
    held.callback(lock.release)
    if not _lock_existing(mark_of(entry.path), held):
        return IN_USE
    now = inspect_entry(entry.kind, entry.path)
    # creating the lock changed the time of an empty folder
    return CHANGED if now is None or (now.used > entry.used and now.size) else None


def _lock_existing(path: Path, held: ExitStack) -> bool:
    """Lock a file exclusively, if it exists; False if a reader has a shared lock on it (entries.hold_entry)."""
    try:
        file = open_locked(path, shared=False)
    except FileNotFoundError:
        return True
    if file is None:
        return False
    held.callback(os.close, file)
    return True


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────
def cache_limit() -> int | None:
    """The most bytes of entries of the kinds in LIMITED: ``$SCOREMODE_CACHE_LIMIT``; None: no limit."""
    given = os.environ.get("SCOREMODE_CACHE_LIMIT", "").strip()
    if not given:
        return DEFAULT_LIMIT
    try:
        return None if given.lower() == "none" else parse_size(given) or None
    except ValueError as error:
        raise OptionError(f"SCOREMODE_CACHE_LIMIT: {error}", fix="or none, for no limit") from None


def make_room(kept: Path) -> None:
    """Remove the least recently used entries if the cache exceeds its limit. ``kept`` is the newest entry.

    An entry that alone exceeds the limit does not push out others: it does not count, and it is the first to go.
    """
    limit = cache_limit()
    if limit is None or not is_cached(kept):
        return
    with suppress(OSError, RunError):  # a failed removal must not fail the run
        root = cache_folder()
        found = list(entries(root, LIMITED))
        others = [entry for entry in found if entry.path != root / kept.parent.name / kept.name]
        gone = evict((entry for entry in others if entry.size > limit), older_than=0.0).removed
        total, fitting = (sum(e.size for e in some if e.size <= limit) for some in (found, others))
        if total > limit:
            target = int(limit * FILLED_AFTER_REMOVAL) - (total - fitting)
            gone += evict((entry for entry in others if entry.size <= limit), larger_than=target).removed
        if gone:
            _announce(gone, limit)


def _announce(gone: list[Entry], limit: int) -> None:
    counted = counts_in_words({kind: sum(entry.kind == kind for entry in gone) for kind in LIMITED})
    newest = moment(max(entry.used for entry in gone) + 60).astimezone()  # to the minute, and never too early
    freed = size_words(sum(entry.size for entry in gone))
    print_line(
        f"cache: removed {counted} ({freed}), last used before {newest:%Y-%m-%d %H:%M}, to stay "
        f"below {size_words(limit)}; SCOREMODE_CACHE_LIMIT changes the limit"
    )
