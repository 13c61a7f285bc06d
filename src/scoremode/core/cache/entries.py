"""The cache folder: its entries, each with an age, a size and a lock, and their removal.

runs/DIGEST, references/DIGEST   run folders; DIGEST is computed from the run's identity
prob/DIGEST                      results of pairs (verbs/prob/many_pairs.py)
KIND/DIGEST                      what a wing keeps (``cache`` in its wing.py)
models/NAME                      converted checkpoints; scoremode.json is written last
files/DIGEST                     copies of files behind URIs
texts/DIGEST                     tokens of long texts, which earlier versions kept
KIND/.removed-NAME-TOKEN         an entry whose removal was interrupted

An entry is ours if scoremode uses its name and the names of all its files; a model or a copy must also have a mark that
scoremode wrote. Anything else is foreign: it is not listed, measured, followed or removed.

A process that writes an entry holds the lock file in it; a process that reads it may share a lock on its mark. To be
removed, an entry is locked, inspected again and renamed; then its files are deleted. ``mark_used`` and ``hold_entry``
do nothing for folders that are not entries of the cache, and do not fail if the cache is not writable.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from scoremode.core.cache.units import counts_in_words, parse_size, size_words
from scoremode.core.disk import folders
from scoremode.core.disk.folders import JOURNAL, LOCK, MANIFEST, MODEL_MARK, cache_folder
from scoremode.core.disk.locks import Lock, end_sharing, open_locked, share_until_exit
from scoremode.core.extensions import wings
from scoremode.core.strict_json import read_object
from scoremode.errors import OptionError, RunError, print_line

OF_WINGS = {kind: files for wing in wings() for kind, files in wing.cache.items()}
MARKS = {
    "runs": MANIFEST,
    "references": MANIFEST,
    "prob": MANIFEST,
    **{kind: files.mark for kind, files in OF_WINGS.items()},
    "models": MODEL_MARK,
    "texts": "tokens.json",
    "files": folders.FILE_MARK,
}
"""By kind: the file that is written last. Its modification time is the entry's last use."""
KINDS = tuple(MARKS)
LIMITED = tuple(kind for kind in KINDS if kind != "models")  # what the limit applies to
JOURNALS = {JOURNAL, *(files.journal for files in OF_WINGS.values() if files.journal)}
OUR_FILES = {*MARKS.values(), *JOURNALS, LOCK, folders.SCORES, folders.RESULTS, folders.PLACE, folders.ABOUT}
OUR_PATTERN = re.compile(r"\.scoremode-([0-9a-f]{16}|part)\.tmp|[a-z_]+\.(bin|wide)")  # unfinished; columns of tokens
OF_MODELS = re.compile(
    r"((generation_|tokenizer_)?config|tokenizer|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|"
    r"chat_template\.jinja|model\.safetensors"
)
FIELDS = {"models": {"source", "sha256", "conversion"}, "files": {"place", "version", "size", "sha256"}}
"""Of marks of entries whose other files do not all have names of ours."""
DIGEST = re.compile(r"[0-9a-f]{20}")
LEFTOVER = re.compile(r"\.removed-[\w.-]+-[0-9a-f]{16}")

DEFAULT_LIMIT = 50 * 10**9
FILLED_AFTER_REMOVAL = 0.9  # share of the limit that stays filled, so that not every run causes another removal
IN_USE = "another process is using it"
CHANGED = "it was used just now"


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str  # one of KINDS
    path: Path
    size: int  # bytes of its files
    used: float  # when it was last written, resumed or read; seconds since 1970


def entries(root: Path, kinds: Iterable[str] = KINDS) -> Iterator[Entry]:
    """The entries of these kinds, in no particular order. Links are not followed."""
    for kind in kinds:
        folder = root / kind
        try:
            names = os.listdir(folder) if stat.S_ISDIR(folder.lstat().st_mode) else []
        except FileNotFoundError:
            continue
        except OSError as error:
            fix = "set SCOREMODE_CACHE to a folder of your own"
            raise RunError(f"{folder} cannot be read ({error.strerror})", fix=fix) from None
        yield from (entry for name in names if (entry := inspect_entry(kind, folder / name)) is not None)


def inspect_entry(kind: str, path: Path) -> Entry | None:
    """One entry as it is now, judged by names; None if it is foreign, gone or not readable."""
    try:
        info = path.lstat()
        files = _files(path) if stat.S_ISDIR(info.st_mode) else None
    except OSError:
        return None
    if files is None or not _is_ours(kind, path, files):
        return None
    # not the folder's own time, which a lock file changes
    telling = files.keys() & {MARKS[kind], *JOURNALS} or files.keys() - {LOCK}
    used = max((files[name].st_mtime for name in telling), default=info.st_mtime)
    return Entry(kind, path, sum(file.st_size for file in files.values()), used)


def _is_ours(kind: str, path: Path, files: dict[str, os.stat_result]) -> bool:
    others = [name for name in files if not _is_our_file(kind, name)]
    may_have = 1 if kind == "files" else 0  # a copy has the name of its original
    if len(others) > may_have or not all(stat.S_ISREG(file.st_mode) for file in files.values()):
        return False
    if LEFTOVER.fullmatch(path.name):
        return True
    is_named = kind == "models" or DIGEST.fullmatch(path.name) is not None
    needs_mark = kind == "models" or bool(others)
    return is_named and (not needs_mark or _has_mark(kind, path))


def _is_our_file(kind: str, name: str) -> bool:
    is_ours = name in OUR_FILES or folders.is_reference_file(name) or OUR_PATTERN.fullmatch(name) is not None
    return is_ours or (kind == "models" and OF_MODELS.fullmatch(name) is not None)


def _has_mark(kind: str, path: Path) -> bool:
    """Is the file that is written last there, with the fields that we write?"""
    with suppress(OSError, ValueError):
        return read_object(path / MARKS[kind]).keys() == FIELDS[kind]
    return False


def _files(folder: Path) -> dict[str, os.stat_result]:
    """Every file and link in a folder, by relative name; links are not followed."""
    files = {}
    for here, inside, names in os.walk(folder):
        for path in (os.path.join(here, name) for name in (*names, *inside)):
            info = os.lstat(path)
            if not stat.S_ISDIR(info.st_mode):
                files[os.path.relpath(path, folder)] = info
    return files


# ── in use ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def mark_of(folder: Path) -> Path:
    """The file that is written last. Readers lock it."""
    return folder / MARKS[folder.parent.name]


def is_cached(folder: Path) -> bool:
    """Is this an entry of the cache? A folder that a user created there is not."""
    kind = folder.parent
    is_named = DIGEST.fullmatch(folder.name) is not None or kind.name == "models"
    return is_named and kind.name in KINDS and os.path.abspath(kind.parent) == os.path.abspath(cache_folder())


def mark_used(folder: Path) -> None:
    """Record that an entry of the cache was used: the least recently used entries are removed first."""
    if is_cached(folder):
        with suppress(OSError):  # a cache that is not writable is not pruned either
            os.utime(mark_of(folder))


def hold_entry(folder: Path) -> None:
    """Protect an entry of the cache from removal until this process ends, because its files are opened later.

    (A run does not need this: its file stays open and survives the removal.)
    """
    mark_used(folder)
    if is_cached(folder):
        share_until_exit(mark_of(folder))


# ── removal ──────────────────────────────────────────────────────────────────────────────────────────────────────────
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
    entries: Iterable[Entry], *, older_than: float | None = None, larger_than: int | None = None, dry_run: bool = False
) -> Outcome:
    """Remove entries not used for ``older_than`` seconds, then the least recently used beyond ``larger_than`` bytes."""
    waiting, now = sorted(entries, key=lambda entry: entry.used), time.time()
    outcome = Outcome(left=sum(entry.size for entry in waiting))
    for entry in waiting:
        old = older_than is not None and max(0.0, now - entry.used) >= older_than
        if not old and (larger_than is None or outcome.left <= larger_than):
            continue
        if not dry_run and (reason := remove(entry)) is not None:
            outcome.skipped.append((entry, reason))
            continue
        outcome.removed.append(entry)
        outcome.left -= entry.size
    return outcome


def remove(entry: Entry) -> str | None:
    """Remove an entry; return the reason if it was not removed."""
    try:
        with ExitStack() as held:
            if (reason := _take(entry, held)) is not None:
                return reason
            away = entry.path.with_name(f".removed-{entry.path.name.lstrip('.')}-{secrets.token_hex(8)}")
            entry.path.rename(away)
        shutil.rmtree(away, ignore_errors=True)
        return "not all of it could be deleted" if away.exists() else None
    except (OSError, RunError) as error:  # Lock raises RunError
        return f"it cannot be removed ({error.strerror})" if isinstance(error, OSError) else error.message


def _take(entry: Entry, held: ExitStack) -> str | None:
    """Lock the entry and inspect it again, because it may have changed; return the reason if it must stay."""
    lock = Lock(entry.path / LOCK)
    if not lock.acquire():
        return IN_USE
    held.callback(lock.release)
    with suppress(FileNotFoundError):
        file = open_locked(mark_of(entry.path), shared=False)
        if file is None:  # a reader shares a lock on it
            return IN_USE
        held.callback(os.close, file)
    now = inspect_entry(entry.kind, entry.path)
    # creating the lock changed the time of an empty folder
    return CHANGED if now is None or (now.used > entry.used and now.size) else None


def drop_entry(folder: Path) -> None:
    """Removes an entry of the cache that this process has read, unless another process is using it."""
    end_sharing(mark_of(folder))
    entry = inspect_entry(folder.parent.name, folder)
    if entry is not None:
        remove(entry)


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────
def cache_limit() -> int | None:
    """The limit in bytes on all entries of the kinds in LIMITED, ``$SCOREMODE_CACHE_LIMIT``; None: no limit."""
    text = os.environ.get("SCOREMODE_CACHE_LIMIT", "").strip()
    if not text:
        return DEFAULT_LIMIT
    try:
        return None if text.lower() == "none" else parse_size(text) or None
    except ValueError as error:
        raise OptionError(f"SCOREMODE_CACHE_LIMIT: {error}", fix="or none, for no limit") from None


def make_room(folder: Path) -> None:
    """Remove the least recently used entries if all but ``folder``, which is the newest, exceed the limit."""
    limit = cache_limit()
    if limit is None or not is_cached(folder):
        return
    with suppress(OSError, RunError):  # a failed removal must not fail the run
        root = cache_folder()
        others = [entry for entry in entries(root, LIMITED) if entry.path != root / folder.parent.name / folder.name]
        if sum(entry.size for entry in others) <= limit:
            return
        gone = evict(others, larger_than=int(limit * FILLED_AFTER_REMOVAL))
        if gone.removed:
            counted = counts_in_words({kind: sum(entry.kind == kind for entry in gone.removed) for kind in LIMITED})
            print_line(
                f"cache: removed {counted} ({size_words(gone.freed)}), to stay below {size_words(limit)}; "
                "SCOREMODE_CACHE_LIMIT changes the limit"
            )
