"""The contents of the cache folder: every entry with its size, its last use and its state.

runs/DIGEST, references/DIGEST   run folders; DIGEST is computed from the run's identity
attributions/DIGEST              measured units of candidates (store/attribution_folder.py)
models/NAME                      converted checkpoints; scoremode.json is written last
files/DIGEST                     copies of files behind URIs (remote/copies.py); results on their way to a URI
tasks/DIGEST                     answers that scoremode tasks kept before it read logs of lm-eval; nothing reads them
texts/DIGEST                     tokens of long texts (token_store.py)
tokenizers/DIGEST                tokenizers as Transformers made them (text/tokenizer_file.py)
logs/ENGINE-….log                messages of an engine that failed
sha256.json, usage.txt           remembered hashes, remembered total size
lm-eval-tasks.json               of the same time: names of lm-eval's tasks
KIND/.removed-NAME-TOKEN         an entry whose deletion was interrupted

An entry is ours if scoremode uses its name and the names of all its files. Anything else is foreign: it is listed, but
never opened, measured, followed or removed.

``mark_used`` and ``hold_entry`` protect an entry that is being read. They do nothing for folders that are not entries
of the cache, and do not fail if the cache is not writable.
"""

from __future__ import annotations

import os
import re
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scoremode.disk import folders
from scoremode.disk.folders import JOURNAL, LOCK, MANIFEST, MODEL_MARK, PLACE, TOKENS_MARK
from scoremode.disk.locks import open_locked, share_until_exit
from scoremode.disk.manifests import is_line
from scoremode.errors import RunError, harmless
from scoremode.strict_json import read_object

KINDS = ("runs", "references", "attributions", "models", "logs", "tasks", "texts", "files", "tokenizers")
MARKS = {
    "attributions": folders.ATTRIBUTION,
    "models": MODEL_MARK,
    "tasks": folders.ANSWERS,
    "texts": TOKENS_MARK,
    "files": folders.FILE_MARK,
    "tokenizers": folders.TOKENIZER_MARK,
}
SMALL = {
    folders.HASHES: "hashes of large files",
    folders.USAGE: "total size",
    folders.EVICTING: "lock of the process that makes room",
    folders.TASK_INDEX: "names of lm-eval's tasks",
}
FINISHED, UNFINISHED, DAMAGED, OUTDATED = "finished", "unfinished", "damaged", "outdated"
FOREIGN, REMOVED, KEPT = "foreign", "removed", "kept"
UNFINISHED_NOTES = {"texts": "its text was not read to the end", "files": "it was not fetched completely"}
DIGEST = re.compile(r"[0-9a-f]{20}")
LOG = re.compile(r"[a-z]+-[0-9]+-[0-9a-f]{8}\.log")
CONVERSION = re.compile(r"\.[\w.-]+\.[a-z0-9_]{8}")  # a folder made by tempfile.mkdtemp in models/embedded.py
LEFTOVER = re.compile(r"\.removed-[\w.-]+-[0-9a-f]{16}")
COLUMN = re.compile(r"[a-z_]+\.(bin|wide)")  # a column of tokens; one that is being written in a larger type

Stats = dict[str, os.stat_result]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the cache."""

    kind: str  # one of KINDS, or "other"
    path: Path
    size: int  # bytes of its files
    used: float  # when it was last written, resumed or read; seconds since 1970
    state: str
    note: str = ""  # what is wrong with it
    facts: dict[str, Any] = field(default_factory=dict)  # what it contains

    @property
    def removable(self) -> bool:
        return self.state not in (FOREIGN, KEPT)

    @property
    def is_folder(self) -> bool:
        return self.kind != "logs" and self.removable


def mark_of(folder: Path) -> Path:
    """The file whose modification time is the entry's last use; without it, the entry is unfinished."""
    return folder / MARKS.get(folder.parent.name, MANIFEST)


def entries(root: Path, kinds: Iterable[str] = KINDS) -> Iterator[Entry]:
    """The entries of these kinds, in no particular order. Links are not followed."""
    for kind in kinds:
        folder = root / kind
        if folder.is_dir() and not folder.is_symlink():
            yield from (inspect_entry(kind, Path(found.path)) for found in _scan(folder))


def other_entries(root: Path) -> Iterator[Entry]:
    """Everything outside the folders of KINDS: small files of scoremode, and foreign files."""
    for found in _scan(root) if root.exists() else ():
        if found.name in KINDS and found.is_dir(follow_symlinks=False):
            continue
        path, info, what = Path(found.path), found.stat(follow_symlinks=False), SMALL.get(found.name)
        if folders.is_temporary(found.name):
            what = "a file that is being written, or was left by a killed process"
        if what is not None and stat.S_ISREG(info.st_mode):
            yield Entry("other", path, info.st_size, info.st_mtime, KEPT, facts={"what": what})
        else:
            yield _foreign("other", path, info, "a link" if found.is_symlink() else "not made by scoremode")


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be read ({error.strerror})", fix="set SCOREMODE_CACHE to a folder of your own"
        ) from None


def inspect_entry(kind: str, path: Path) -> Entry:
    """One entry as it is now, judged by names, sizes and times."""
    try:
        info = path.lstat()
        if kind == "logs":
            ours = stat.S_ISREG(info.st_mode) and LOG.fullmatch(path.name)
            return Entry(kind, path, info.st_size, info.st_mtime, FINISHED) if ours else _foreign(kind, path, info)
        if not stat.S_ISDIR(info.st_mode):
            return _foreign(kind, path, info, "a link" if stat.S_ISLNK(info.st_mode) else "not a folder")
        if LEFTOVER.fullmatch(path.name):
            return Entry(kind, path, _size(_files(path)), info.st_mtime, REMOVED, "its deletion was interrupted")
        return _model(path, info) if kind == "models" else _digest_folder(kind, path, info)
    except OSError as error:
        return Entry(kind, path, 0, 0.0, FOREIGN, f"cannot be read ({error.strerror})")


def _foreign(kind: str, path: Path, info: os.stat_result, note: str = "not made by scoremode") -> Entry:
    return Entry(kind, path, 0, info.st_mtime, FOREIGN, note)


def _model(path: Path, info: os.stat_result) -> Entry:
    files = _files(path)
    if MODEL_MARK in files:
        try:
            made = read_object(path / MODEL_MARK)
        except ValueError:
            made = {}
        if {"source", "sha256", "conversion"} <= made.keys():
            facts = {"what": f"converted from {made['source']}"} if is_line(made["source"]) else {}
            return Entry("models", path, _size(files), files[MODEL_MARK].st_mtime, FINISHED, facts=facts)
    elif CONVERSION.fullmatch(path.name) and all(name.split(os.sep)[0] == "model" for name in files):
        newest = max([info.st_mtime, *(found.st_mtime for found in files.values())])
        return Entry("models", path, _size(files), newest, UNFINISHED, "its conversion was interrupted")
    return _foreign("models", path, info)


def _digest_folder(kind: str, path: Path, info: os.stat_result) -> Entry:
    """The entry of a folder whose name is a digest of its content's identity: every kind but logs and models."""
    if not DIGEST.fullmatch(path.name):
        return _foreign(kind, path, info)
    files, mark = _files(path, deep=False), MARKS.get(kind, MANIFEST)
    strange = [name for name, found in files.items() if not (stat.S_ISREG(found.st_mode) and _is_ours(kind, name))]
    shown = [name for name in files if not name.startswith(".")]
    if kind == "files" and PLACE not in files and len(shown) > 1:  # one copy, which may have any name
        strange += shown
    if strange:
        return _foreign(kind, path, info, f"contains {harmless(min(strange))}")
    # not the folder's own time, which a lock file changes
    telling = files.keys() & {mark, JOURNAL, folders.PARTIAL_ATTRIBUTION} or files.keys() - {LOCK}
    used = max((files[name].st_mtime for name in telling), default=info.st_mtime)
    entry = Entry(kind, path, _size(files), used, FINISHED)
    is_run = kind in ("runs", "references")
    if mark in files or (kind == "files" and PLACE in files):
        needed = {folders.SCORES} if kind == "runs" else {folders.SCORES, folders.REFERENCE}
        whole = not is_run or needed <= files.keys()
        return entry if whole else replace(entry, state=DAMAGED, note="files are missing")
    if is_run and JOURNAL not in files and files.keys() - {LOCK}:
        return replace(entry, state=DAMAGED, note=f"has neither {MANIFEST} nor {JOURNAL}")
    return replace(entry, state=UNFINISHED, note=UNFINISHED_NOTES.get(kind, ""))


def _is_ours(kind: str, name: str) -> bool:
    """May an entry of this kind contain a file of this name?"""
    if kind == "files" or name in (LOCK, MARKS.get(kind, MANIFEST)):
        return True
    if kind in ("texts", "tokenizers", "attributions") and folders.is_temporary(name):
        return True
    if kind == "attributions":
        return name == folders.PARTIAL_ATTRIBUTION
    if kind == "texts":
        return COLUMN.fullmatch(name) is not None
    known = name in (folders.SCORES, JOURNAL, PLACE) or folders.is_reference_file(name) or folders.is_temporary(name)
    return kind in ("runs", "references") and known


def _files(folder: Path, *, deep: bool = True) -> Stats:
    """Every file in a folder, by relative name; links are not followed."""
    found: Stats = {}
    waiting = [(str(folder), "")]
    while waiting:
        here, before = waiting.pop()
        with os.scandir(here) as inside:
            for entry in inside:
                if deep and entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{before}{entry.name}{os.sep}"))
                else:
                    found[before + entry.name] = entry.stat(follow_symlinks=False)
    return found


def _size(files: Stats) -> int:
    return sum(found.st_size for found in files.values())


# ── in use ───────────────────────────────────────────────────────────────────────────────────────────────────────────
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
