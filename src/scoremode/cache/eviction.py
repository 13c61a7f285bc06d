"""Remove entries of the cache: old ones, or the least recently used beyond its size limit, never one that is in use.

An entry is locked, inspected again and renamed to KIND/.removed-NAME-TOKEN; then its files are deleted. If the process
is killed, the entry is either complete under its own name, or the next removal deletes the rest of the renamed one.

usage.txt remembers the size of the cache: one line with the time of a measurement and its total, then one line per
entry added since. Each line is appended with one call, so that processes need no lock. The total is measured again
after a day, because kills, manual deletions and simultaneous measurements make it inaccurate.
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

from scoremode.cache.entries import REMOVED, UNFINISHED, Entry, entries, inspect_entry, is_cached, mark_of
from scoremode.cache.units import counts_in_words, moment, parse_size, size_words
from scoremode.disk.files import write_atomically
from scoremode.disk.folders import EVICTING, LOCK, USAGE, cache_folder
from scoremode.disk.locks import Lock, hold_lock, open_locked
from scoremode.errors import OptionError, RunError, print_line

DEFAULT_LIMIT = 50 * 10**9
LIMITED = ("references", "runs", "attributions", "texts", "files", "tokenizers")  # what the limit applies to
FILLED_AFTER_REMOVAL = 0.9  # share of the limit that stays filled, so that not every run causes another removal
LONGEST_AGE = 86_400.0  # seconds after which the total is measured again
LONGEST_USAGE = 1 << 20  # bytes; about 100,000 entries. A longer usage.txt is not read
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

    Entries of more than ``too_large`` bytes are removed first; if they are in use, their bytes do not count. The
    rest of an interrupted removal is always removed.
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
    if entry.kind not in ("models", "logs"):
        lock = Lock(entry.path / LOCK)
        # a dry run creates no lock file: if there is none, no process holds the lock
        if not (_lock_existing(lock.path, held) if dry_run else lock.acquire()):
            return IN_USE
        held.callback(lock.release)
    if entry.is_folder and not _lock_existing(mark_of(entry.path), held):
        return IN_USE
    now = inspect_entry(entry.kind, entry.path)
    started = entry.state == UNFINISHED and not entry.size  # creating the lock changed an empty folder's time
    if not now.removable or (now.used > entry.used and not started):
        return CHANGED
    if entry.kind == "models" and entry.state == UNFINISHED and time.time() - now.used < CONVERTING:
        return "its conversion may still be running"
    return None


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


def _delete(folder: Path) -> str | None:
    for _ in range(ATTEMPTS):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            pass  # another process deletes the same folder
        except OSError as error:
            return f"not all of it could be deleted ({error.strerror})"
        if not os.path.lexists(folder):
            return None
    return "not all of it could be deleted"


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

    The limit applies to the kinds in LIMITED. Most calls read only usage.txt, and a removal leaves a tenth of the limit
    free.
    """
    limit = cache_limit()
    if limit is None or not is_cached(kept):
        return
    with suppress(OSError, RunError):  # a failed removal must not fail the run
        root = cache_folder()
        total = add_usage(root, inspect_entry(kept.parent.name, kept).size)
        if total is None or total > limit:
            # two processes at once would remove twice as much
            with hold_lock(root / EVICTING, busy=RunError("another process makes room")):
                _measure(root, root / kept.parent.name / kept.name, limit)


def add_usage(root: Path, size: int) -> int | None:
    """Count a new entry; return the total bytes, or None if they must be measured again."""
    try:
        file = os.open(root / USAGE, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        os.write(file, f"{size}\n".encode())
        if os.fstat(file).st_size > LONGEST_USAGE:
            return None
        lines = os.pread(file, LONGEST_USAGE, 0).decode("ascii").split("\n")
        measured, total = lines[0].split()
        if not 0 <= time.time() - float(measured) < LONGEST_AGE:
            return None
        return int(total) + sum(int(line) for line in lines[1:] if line)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def _measure(root: Path, kept: Path, limit: int) -> None:
    """Measure the cache, remove entries beyond the limit, and remember the total."""
    found = list(entries(root, LIMITED))
    mine, total = sum(e.size for e in found if e.path == kept), sum(e.size for e in found)
    if total > limit or any(entry.state == REMOVED for entry in found):
        beside = 0 if mine > limit else mine  # an entry that alone exceeds the limit does not push out others
        target = int(limit * FILLED_AFTER_REMOVAL) - beside if total > limit else None
        outcome = evict((e for e in found if e.path != kept), larger_than=target, too_large=limit)
        total = outcome.left + mine
        _announce(outcome, limit)
    with suppress(OSError):
        write_atomically(root / USAGE, f"{int(time.time())} {total}\n".encode())


def _announce(outcome: Outcome, limit: int) -> None:
    gone = [entry for entry in outcome.removed if entry.state != REMOVED]
    if not gone:
        return
    counted = counts_in_words({kind: sum(entry.kind == kind for entry in gone) for kind in LIMITED})
    newest = moment(max(entry.used for entry in gone) + 60).astimezone()  # to the minute, and never too early
    print_line(
        f"cache: removed {counted} ({size_words(outcome.freed)}), last used before {newest:%Y-%m-%d %H:%M}, to stay "
        f"below {size_words(limit)}; SCOREMODE_CACHE_LIMIT changes the limit"
    )
