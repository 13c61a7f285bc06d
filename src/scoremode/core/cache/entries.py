"""The contents of the cache folder: entries with a kind, a size and an age, and the locks of those in use.

runs/DIGEST, references/DIGEST   run folders; DIGEST is computed from the run's identity
attributions/DIGEST              measured units of candidates (studies/attribution/folder.py)
models/NAME                      converted checkpoints; scoremode.json is written last
files/DIGEST                     copies of files behind URIs; results on their way to a URI
tasks/DIGEST                     answers that scoremode tasks kept before it read logs of lm-eval; nothing reads them
texts/DIGEST                     tokens of long texts (token_store.py)
tokenizers/DIGEST                tokenizers as Transformers made them (core/text/tokenizer_file.py)
logs/ENGINE-….log                messages of an engine that failed
KIND/.removed-NAME-TOKEN         an entry whose removal was interrupted

An entry is ours if scoremode uses its name and the names of all its files. Anything else is foreign: it is not listed,
measured, opened, followed or removed.

A process that writes an entry holds the lock file in it; a process that reads it may share a lock on its mark.
``mark_used`` and ``hold_entry`` do nothing for folders that are not entries of the cache, and do not fail if the cache
is not writable.
"""

from __future__ import annotations

import os
import re
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scoremode.core.disk import folders
from scoremode.core.disk.folders import JOURNAL, LOCK, MANIFEST, MODEL_MARK, PLACE
from scoremode.core.disk.locks import open_locked, share_until_exit
from scoremode.errors import RunError

MARKS = {
    "runs": MANIFEST,
    "references": MANIFEST,
    "attributions": folders.ATTRIBUTION,
    "models": MODEL_MARK,
    "logs": "",
    "tasks": folders.ANSWERS,
    "texts": folders.TOKENS_MARK,
    "files": folders.FILE_MARK,
    "tokenizers": folders.TOKENIZER_MARK,
}
"""By kind: the file that is written last. Its modification time is the entry's last use."""
KINDS = tuple(MARKS)
DIGEST = re.compile(r"[0-9a-f]{20}")
LOG = re.compile(r"[a-z]+-[0-9]+-[0-9a-f]{8}\.log")
CONVERSION = re.compile(r"\.[\w.-]+\.[a-z0-9_]{8}")  # a folder made by tempfile.mkdtemp in core/models/embedded.py
CONVERTING = 3600.0  # seconds; a conversion takes about one minute and holds no lock
LEFTOVER = re.compile(r"\.removed-[\w.-]+-[0-9a-f]{16}")
COLUMN = re.compile(r"[a-z_]+\.(bin|wide)")  # a column of tokens; one that is being written in a larger type

Stats = dict[str, os.stat_result]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the cache."""

    kind: str  # one of KINDS
    path: Path
    size: int  # bytes of its files
    used: float  # when it was last written, resumed or read; seconds since 1970


def entries(root: Path, kinds: Iterable[str] = KINDS) -> Iterator[Entry]:
    """The entries of these kinds, in no particular order. Links are not followed."""
    for folder in _scan(root):
        if folder.name in kinds and folder.is_dir(follow_symlinks=False):
            found = (inspect_entry(folder.name, Path(one.path)) for one in _scan(folder.path))
            yield from (entry for entry in found if entry is not None and not _may_be_converting(entry))


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"{folder} cannot be read ({error.strerror})", fix="set SCOREMODE_CACHE to a folder of your own"
        ) from None


def inspect_entry(kind: str, path: Path) -> Entry | None:
    """One entry as it is now, judged by names; None if it is foreign, gone or not readable."""
    try:
        info = path.lstat()
        if kind == "logs":
            ours = stat.S_ISREG(info.st_mode) and LOG.fullmatch(path.name)
            return Entry(kind, path, info.st_size, info.st_mtime) if ours else None
        named = kind == "models" or DIGEST.fullmatch(path.name) or LEFTOVER.fullmatch(path.name)
        files = _files(path) if named and stat.S_ISDIR(info.st_mode) else None
    except OSError:
        return None
    if files is None or not _is_ours(kind, path.name, files):
        return None
    # not the folder's own time, which a lock file changes
    telling = files.keys() & {MARKS[kind], JOURNAL, folders.PARTIAL_ATTRIBUTION} or files.keys() - {LOCK}
    used = max((files[name].st_mtime for name in telling), default=info.st_mtime)
    return Entry(kind, path, sum(found.st_size for found in files.values()), used)


def _may_be_converting(entry: Entry) -> bool:
    return entry.kind == "models" and time.time() - entry.used < CONVERTING and not mark_of(entry.path).exists()


def _is_ours(kind: str, name: str, files: Stats) -> bool:
    """Did scoremode make all files of a folder with this name?"""
    if LEFTOVER.fullmatch(name):
        return True
    if kind == "models":
        begun = CONVERSION.fullmatch(name) and all(file.split(os.sep)[0] in ("model", LOCK) for file in files)
        return MODEL_MARK in files or bool(begun)
    if kind == "files" and PLACE not in files and sum(not file.startswith(".") for file in files) > 1:
        return False  # a copy is one file, which may have any name
    return all(stat.S_ISREG(found.st_mode) and _is_our_file(kind, file) for file, found in files.items())


def _is_our_file(kind: str, name: str) -> bool:
    """May a folder of this kind contain a file of this name?"""
    if os.sep in name:
        return False
    if kind == "files" or name in (LOCK, MARKS[kind]) or folders.is_temporary(name):
        return True
    if kind == "attributions":
        return name == folders.PARTIAL_ATTRIBUTION
    if kind == "texts":
        return COLUMN.fullmatch(name) is not None
    known = name in (folders.SCORES, JOURNAL, PLACE) or folders.is_reference_file(name)
    return kind in ("runs", "references") and known


def _files(folder: Path) -> Stats:
    """Every file in a folder, by relative name; links are not followed."""
    found: Stats = {}
    waiting = [(str(folder), "")]
    while waiting:
        here, before = waiting.pop()
        with os.scandir(here) as inside:
            for entry in inside:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{before}{entry.name}{os.sep}"))
                else:
                    found[before + entry.name] = entry.stat(follow_symlinks=False)
    return found


# ── in use ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def mark_of(folder: Path) -> Path:
    """The file that is written last. Readers lock it."""
    return folder / MARKS[folder.parent.name]


def is_cached(folder: Path) -> bool:
    """Is this an entry of the cache? A folder that a user created there is not."""
    kind = folder.parent
    named = DIGEST.fullmatch(folder.name) is not None or kind.name == "models"
    return named and kind.name in KINDS and os.path.abspath(kind.parent) == os.path.abspath(folders.cache_folder())


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
    share_until_exit(mark_of(folder))
