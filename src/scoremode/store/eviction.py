"""Remove entries of the cache: old ones, or the least recently used, never one that is in use.

An entry is locked, inspected again and renamed to KIND/.removed-NAME-TOKEN; then its files are deleted. If the process
is killed, the entry is either complete under its own name, or the next removal deletes the rest of the renamed one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from scoremode.errors import RunError
from scoremode.store.entries import LOCK, REMOVED, UNFINISHED, Entry, inspect_entry, mark_of
from scoremode.store.locks import Lock, open_locked

IN_USE = "another process is using it"
CHANGED = "it was used just now"
GONE = "another process removed it"
CONVERTING = 3600.0  # seconds; a conversion takes about one minute and holds no lock
ATTEMPTS = 100  # to delete a folder that another process deletes at the same time


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
    found: Iterable[Entry],
    *,
    older_than: float | None = None,
    larger_than: int | None = None,
    too_large: int | None = None,
    dry_run: bool = False,
) -> Outcome:
    """Remove entries not used for ``older_than`` seconds, then the least recently used beyond ``larger_than`` bytes.

    Entries of more than ``too_large`` bytes are removed first; those in use do not count. The rest of an interrupted
    removal is always removed.
    """
    waiting = [entry for entry in found if entry.removable]
    waiting.sort(key=lambda entry: (entry.state != REMOVED, not _exceeds(entry, too_large), entry.used))
    outcome, now, excused = Outcome(left=sum(entry.size for entry in waiting)), time.time(), 0
    for entry in waiting:
        old = older_than is not None and max(0.0, now - entry.used) >= older_than
        beyond = larger_than is not None and outcome.left - excused > larger_than
        if not (old or beyond or entry.state == REMOVED):
            continue
        reason = remove(entry, dry_run=dry_run)
        if reason is None:
            outcome.removed.append(entry)
        else:
            outcome.skipped.append((entry, reason))
        if reason in (None, GONE):
            outcome.left -= entry.size
        elif _exceeds(entry, too_large):
            excused += entry.size
    return outcome


def _exceeds(entry: Entry, size: int | None) -> bool:
    return size is not None and entry.size > size


def remove(entry: Entry, *, dry_run: bool = False) -> str | None:
    """Remove an entry; return the reason if it was not removed."""
    try:
        if entry.state == REMOVED:
            return None if dry_run else _delete(entry.path)
        with ExitStack() as held:
            reason = _take(entry, held, dry_run=dry_run)
            if reason is not None or dry_run:
                return reason
            if not entry.is_folder:
                entry.path.unlink(missing_ok=True)
                return None
            away = entry.path.with_name(f".removed-{entry.path.name.lstrip('.')}-{secrets.token_hex(8)}")
            entry.path.rename(away)
        return _delete(away)
    except (OSError, RunError) as error:  # Lock raises RunError
        if not os.path.lexists(entry.path):
            return GONE
        return f"it cannot be removed ({error.strerror})" if isinstance(error, OSError) else error.message


def _take(entry: Entry, held: ExitStack, *, dry_run: bool) -> str | None:
    """Lock the entry and inspect it again, because it may have changed; return the reason if it must stay."""
    locked = ("runs", "references", "tasks", "texts", "files")
    if entry.kind in locked and not _lock(entry.path / LOCK, held, dry_run=dry_run):
        return IN_USE
    if entry.is_folder and not _lock_existing(mark_of(entry.path), held):
        return IN_USE
    now = inspect_entry(entry.kind, entry.path)
    started = entry.state == UNFINISHED and not entry.size  # creating the lock changed an empty folder's time
    if not now.removable or (now.used > entry.used and not started):
        return CHANGED
    if entry.kind == "models" and entry.state == UNFINISHED and time.time() - now.used < CONVERTING:
        return "its conversion may still be running"
    return None


def _lock(path: Path, held: ExitStack, *, dry_run: bool) -> bool:
    """Take the writers' lock. A dry run creates no lock file: if there is none, no process holds the lock."""
    if dry_run:
        return _lock_existing(path, held)
    lock = Lock(path)
    if not lock.acquire():
        return False
    held.callback(lock.release)
    return True


def _lock_existing(path: Path, held: ExitStack) -> bool:
    """Lock an existing file exclusively; False if a reader holds it shared (cache.hold_entry)."""
    try:
        file = open_locked(path, shared=False)
    except FileNotFoundError:
        return True
    if file is None:
        return False
    held.callback(os.close, file)
    return True


def _delete(folder: Path) -> str | None:
    for _ in range(ATTEMPTS):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:  # another process deletes the same folder
            if not os.path.lexists(folder):
                return None
        except OSError as error:
            return f"not all of it could be deleted ({error.strerror})"
        else:
            return None
    return "not all of it could be deleted"
