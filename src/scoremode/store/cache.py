"""The cache folder: where it is, how large it may grow, and the hashes of large files, which are remembered there.

``mark_used`` and ``hold_entry`` protect an entry that is read, ``make_room`` keeps the whole below its limit. All three do nothing
for folders that are not the cache's own, and none of them fails where the cache cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from scoremode.errors import OptionError, RunError
from scoremode.store import usage
from scoremode.store.entries import DIGEST, EVICTING, KINDS, REMOVED, entries, inspect_entry, mark_of
from scoremode.store.eviction import Outcome, evict
from scoremode.store.files import file_sha256, write_atomically
from scoremode.store.locks import hold_lock, open_locked
from scoremode.store.units import counts_in_words, moment, parse_size, size_words
from scoremode.text.json_files import read_object

DEFAULT_LIMIT = 50 * 10**9

LIMITED = ("references", "runs")  # kinds that the limit counts and removes

ROOM = 0.9  # of the limit that is left after a removal, so that not every run removes another

_held_models: dict[Path, int] = {}

ALWAYS_READ = 4 << 20  # bytes of a file that is hashed anew each time

BEGINNING = 1 << 20  # bytes of a larger one that are

SETTLED = 2.0  # seconds; coarser than the clock of any file system in use


def cache_folder() -> Path:
    """``$SCOREMODE_CACHE``, else ``$XDG_CACHE_HOME/scoremode``, else ``~/.cache/scoremode``."""
    if chosen := os.environ.get("SCOREMODE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scoremode"


def is_cached(folder: Path) -> bool:
    """Is this a folder that the cache itself named? One that a user made in there is the user's."""
    kind = folder.parent
    named = DIGEST.fullmatch(folder.name) is not None or kind.name == "models"
    return named and kind.name in KINDS and os.path.abspath(kind.parent) == os.path.abspath(cache_folder())


# ── in use ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def mark_used(folder: Path) -> None:
    """Note that an entry of the cache answered a question: the least recently used go first."""
    if is_cached(folder):
        with suppress(OSError):  # a cache that cannot be written is not cleared either
            os.utime(mark_of(folder))


def hold_entry(folder: Path, owner: object) -> None:
    """Keep an entry of the cache from being removed for as long as ``owner`` lives.

    For files that are opened one by one: a run's columns stay open, and outlive the removal of their folder.
    """
    if is_cached(folder):
        with suppress(OSError):
            file = open_locked(mark_of(folder), shared=True)
            if file is not None:
                weakref.finalize(owner, os.close, file)


def hold_model(folder: Path) -> None:
    """Keep a converted model from being removed until this process ends."""
    mark_used(folder)
    if folder not in _held_models:
        with suppress(OSError):
            file = open_locked(mark_of(folder), shared=True)
            if file is not None:
                _held_models[folder] = file


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────
def cache_limit() -> int | None:
    """Bytes that runs and references in the cache may take: ``$SCOREMODE_CACHE_LIMIT``; None if there is no limit."""
    given = os.environ.get("SCOREMODE_CACHE_LIMIT", "").strip()
    if not given:
        return DEFAULT_LIMIT
    try:
        return None if given.lower() == "none" else parse_size(given) or None
    except ValueError as error:
        raise OptionError(f"SCOREMODE_CACHE_LIMIT: {error}", fix="or none, for no limit") from None


def make_room(kept: Path) -> None:
    """Remove what was not used for longest if the cache has grown beyond its limit. ``kept`` was made just now.

    The limit counts runs and references. Most calls read one small file: the total is remembered (usage.py), and a
    removal leaves a tenth of the limit free.
    """
    limit = cache_limit()
    if limit is None or not is_cached(kept):
        return
    with suppress(OSError, RunError):  # the run is kept, whatever happens to others
        root = cache_folder()
        total = usage.add(root, inspect_entry(kept.parent.name, kept).size)
        if total is None or total > limit:
            with hold_lock(
                root / EVICTING, busy=RunError("another process makes room")
            ):  # two would remove twice as much
                _measure(root, root / kept.parent.name / kept.name, limit)


def _measure(root: Path, kept: Path, limit: int) -> None:
    """Measure the cache, remove what is too much, and remember the total."""
    found = list(entries(root, LIMITED))
    mine, total = sum(e.size for e in found if e.path == kept), sum(e.size for e in found)
    if total > limit or any(entry.state == REMOVED for entry in found):
        beside = 0 if mine > limit else mine  # larger than the limit on its own: others need not go for it
        target = int(limit * ROOM) - beside if total > limit else None
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
    with suppress(OSError, ValueError):  # nobody can be told
        print(line, file=sys.stderr, flush=True)


# ── hashes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def remembered_sha256(path: Path) -> str:
    """The file's sha256. A large one is read whole again only if anything about it changed: checkpoints are large.

    Small files are always read. Of a large one the first MiB, which holds a safetensors header, is always read; the
    rest is believed while path, size, device, inode and both times of change are the same. A copy that keeps size and
    modification time (``cp -p``, ``rsync -t``) has another inode or another time of change of its inode.
    """
    if path.stat().st_size <= ALWAYS_READ:
        return file_sha256(path)
    memo, name, stamp = cache_folder() / "sha256.json", str(path.resolve()), _stamp(path)
    entry = _read_memo(memo).get(name)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("sha256"), str):
        return str(entry["sha256"])
    found = file_sha256(path)
    if _stamp(path) == stamp and _is_settled(path):  # else it may change again without another time of change
        entries = {key: value for key, value in _read_memo(memo).items() if isinstance(value, dict)}
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            written = {**entries, name: {"stamp": stamp, "sha256": found}}
            write_atomically(memo, json.dumps(written, indent=0).encode())
        except OSError:
            pass  # a cache that cannot be written costs time, not correctness
    return found


def _stamp(path: Path) -> str:
    """All that is cheap to know of a file's content."""
    with path.open("rb") as file:
        beginning = hashlib.sha256(file.read(BEGINNING)).hexdigest()
        stat = os.fstat(file.fileno())
    times = f"{stat.st_mtime_ns}|{stat.st_ctime_ns}"
    return f"{stat.st_size}|{stat.st_dev}|{stat.st_ino}|{times}|{beginning}"


def _is_settled(path: Path) -> bool:
    """Was the file last changed so long ago that another change would have another time?"""
    return abs(time.time() - path.stat().st_ctime) > SETTLED


def _read_memo(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
