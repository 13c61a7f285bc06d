"""The cache folder: its size limit, and the remembered hashes of large files.

``mark_used`` and ``hold_entry`` protect an entry that is being read; ``make_room`` keeps the cache below its limit. All
three do nothing for folders that are not entries of the cache, and none of them fails if the cache is not writable.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from scoremode.errors import OptionError, RunError, print_line
from scoremode.places.cache_home import cache_folder as cache_folder  # noqa: PLC0414  # others import it from here
from scoremode.store import usage
from scoremode.store.entries import DIGEST, EVICTING, KINDS, REMOVED, entries, inspect_entry, mark_of
from scoremode.store.eviction import Outcome, evict
from scoremode.store.files import file_sha256, write_atomically
from scoremode.store.locks import hold_lock, open_locked
from scoremode.store.units import counts_in_words, moment, parse_size, size_words
from scoremode.text.json_files import read_object

DEFAULT_LIMIT = 50 * 10**9

LIMITED = ("references", "runs", "texts", "files")  # kinds of entries that the limit applies to

FILLED_AFTER_REMOVAL = (
    0.9  # share of the limit that stays filled after a removal, so that not every run causes another removal
)

_held_models: dict[Path, int] = {}

ALWAYS_READ = 4 << 20  # bytes; smaller files are hashed every time

BEGINNING = 1 << 20  # first bytes of a larger file that are hashed every time

SETTLED = 2.0  # seconds; longer than the time resolution of any file system in use


def is_cached(folder: Path) -> bool:
    """Is this an entry of the cache? A folder that a user created there is not."""
    kind = folder.parent
    named = DIGEST.fullmatch(folder.name) is not None or kind.name == "models"
    return named and kind.name in KINDS and os.path.abspath(kind.parent) == os.path.abspath(cache_folder())


# ── in use ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def mark_used(folder: Path) -> None:
    """Record that an entry of the cache was used: the least recently used entries are removed first."""
    if is_cached(folder):
        with suppress(OSError):  # a cache that is not writable is not pruned either
            os.utime(mark_of(folder))


def hold_entry(folder: Path, owner: object) -> None:
    """Protect an entry of the cache from removal as long as ``owner`` exists.

    For entries whose files are opened later. (A run does not need this: its file stays open and survives the removal.)
    """
    if is_cached(folder):
        with suppress(OSError):
            file = open_locked(mark_of(folder), shared=True)
            if file is not None:
                weakref.finalize(owner, os.close, file)


def hold_model(folder: Path) -> None:
    """Protect a converted model from removal until this process ends."""
    mark_used(folder)
    if folder not in _held_models:
        with suppress(OSError):
            file = open_locked(mark_of(folder), shared=True)
            if file is not None:
                _held_models[folder] = file


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────
def cache_limit() -> int | None:
    """Most bytes of runs, references, texts and fetched files: ``$SCOREMODE_CACHE_LIMIT``; None: no limit."""
    given = os.environ.get("SCOREMODE_CACHE_LIMIT", "").strip()
    if not given:
        return DEFAULT_LIMIT
    try:
        return None if given.lower() == "none" else parse_size(given) or None
    except ValueError as error:
        raise OptionError(f"SCOREMODE_CACHE_LIMIT: {error}", fix="or none, for no limit") from None


def make_room(kept: Path) -> None:
    """Remove the least recently used entries if the cache exceeds its limit. ``kept`` is the newest entry.

    The limit applies to runs, references, texts and fetched files. Most calls read only one small file: the total is
    remembered (usage.py), and a removal leaves a tenth of the limit free.
    """
    limit = cache_limit()
    if limit is None or not is_cached(kept):
        return
    with suppress(OSError, RunError):  # a failed removal must not fail the run
        root = cache_folder()
        total = usage.add(root, inspect_entry(kept.parent.name, kept).size)
        if total is None or total > limit:
            # two processes at once would remove twice as much
            with hold_lock(root / EVICTING, busy=RunError("another process makes room")):
                _measure(root, root / kept.parent.name / kept.name, limit)


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
    usage.write(root, total)


def _announce(outcome: Outcome, limit: int) -> None:
    gone = [entry for entry in outcome.removed if entry.state != REMOVED]
    if not gone:
        return
    counted = counts_in_words({kind: sum(entry.kind == kind for entry in gone) for kind in LIMITED})
    newest = moment(max(entry.used for entry in gone) + 60).astimezone()  # to the minute, and never too early
    line = (
        f"cache: removed {counted} ({size_words(outcome.freed)}), last used before {newest:%Y-%m-%d %H:%M}, to stay "
        f"below {size_words(limit)}; SCOREMODE_CACHE_LIMIT changes the limit"
    )
    print_line(line)


# ── hashes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def remembered_sha256(path: Path) -> str:
    """The file's sha256, remembered for large files, because checkpoints are large.

    A file of up to ALWAYS_READ bytes is always read. Of a larger one only the first MiB, which contains a safetensors
    header, is always read; the whole file is read again only if its path, size, device, inode, mtime or ctime changed.
    A copy that keeps size and modification time (``cp -p``, ``rsync -t``) has a different inode or ctime.
    """
    if path.stat().st_size <= ALWAYS_READ:
        return file_sha256(path)
    memo, name, stamp = cache_folder() / "sha256.json", str(path.resolve()), _stamp(path)
    entry = _read_memo(memo).get(name)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("sha256"), str):
        return str(entry["sha256"])
    found = file_sha256(path)
    if _stamp(path) == stamp and _is_settled(path):  # else another change could leave the same times
        entries = {key: value for key, value in _read_memo(memo).items() if isinstance(value, dict)}
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            written = {**entries, name: {"stamp": stamp, "sha256": found}}
            write_atomically(memo, json.dumps(written, indent=0).encode())
        except OSError:
            pass  # without a writable cache the file is hashed again next time
    return found


def _stamp(path: Path) -> str:
    """Everything about a file's content that is cheap to read."""
    with path.open("rb") as file:
        beginning = hashlib.sha256(file.read(BEGINNING)).hexdigest()
        stat = os.fstat(file.fileno())
    times = f"{stat.st_mtime_ns}|{stat.st_ctime_ns}"
    return f"{stat.st_size}|{stat.st_dev}|{stat.st_ino}|{times}|{beginning}"


def _is_settled(path: Path) -> bool:
    """Was the last change so long ago that another change would get a different time?"""
    return abs(time.time() - path.stat().st_ctime) > SETTLED


def _read_memo(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
