"""The contents of the cache folder: every entry with its size, its last use and its state.

runs/DIGEST, references/DIGEST   folders of runs.py; DIGEST is computed from the run's identity
models/NAME                      converted checkpoints; scoremode.json is written last
files/DIGEST                     copies of files that lie elsewhere (places/copies.py)
tasks/DIGEST                     answers to documents of tasks (answers.py)
texts/DIGEST                     tokens of long texts (token_store.py)
logs/ENGINE-….log                messages of an engine that failed
sha256.json, usage.txt           remembered hashes, remembered total size
lm-eval-tasks.json               names of lm-eval's tasks, and the files they are defined in
KIND/.removed-NAME-TOKEN         an entry whose deletion was interrupted

An entry is ours if scoremode uses its name and the names of all its files. Anything else is foreign: it is listed, but
never opened, measured, followed or removed. Only manifests and journals are opened, to describe an entry.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scoremode.disk.records import read_record_header
from scoremode.errors import RunError, harmless
from scoremode.places.copies import MARK as FILE_MARK
from scoremode.store import sealed
from scoremode.store.files import TEMPORARY
from scoremode.store.reference_format import REFERENCE, is_own_name
from scoremode.store.run_format import FORMAT, JOURNAL, MANIFEST, SCORES
from scoremode.text.json_files import read_object

KINDS = ("runs", "references", "models", "logs", "tasks", "texts", "files")
LOCK, MODEL_MARK, ANSWERS, TOKENS_MARK = ".lock", "scoremode.json", "answers.records", "tokens.json"
PLACE = ".place.json"  # in the work folder of a run elsewhere: where it goes (remote_runs.py)
HASHES, USAGE, EVICTING, TASK_INDEX = "sha256.json", "usage.txt", ".evicting.lock", "lm-eval-tasks.json"
SMALL = {
    HASHES: "hashes of large files",
    USAGE: "total size",
    EVICTING: "lock of the process that makes room",
    TASK_INDEX: "names of lm-eval's tasks",
}
FINISHED, UNFINISHED, DAMAGED, OUTDATED = "finished", "unfinished", "damaged", "outdated"
FOREIGN, REMOVED, KEPT = "foreign", "removed", "kept"
DIGEST = re.compile(r"[0-9a-f]{20}")
LOG = re.compile(r"[a-z]+-[0-9]+-[0-9a-f]{8}\.log")
CONVERSION = re.compile(r"\.[\w.-]+\.[a-z0-9_]{8}")  # a folder made by tempfile.mkdtemp in models/embedded.py
LEFTOVER = re.compile(r"\.removed-[\w.-]+-[0-9a-f]{16}")

MARKS = {"models": MODEL_MARK, "tasks": ANSWERS, "texts": TOKENS_MARK, "files": FILE_MARK}
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
    facts: dict[str, Any] = field(default_factory=dict)  # what it contains, filled by ``described``

    @property
    def removable(self) -> bool:
        return self.state not in (FOREIGN, KEPT)

    @property
    def is_folder(self) -> bool:
        return self.kind != "logs" and self.removable


def mark_of(folder: Path) -> Path:
    """The file whose modification time is the entry's last use."""
    return folder / MARKS.get(folder.parent.name, MANIFEST)


# ── find ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        info = found.stat(follow_symlinks=False)
        temporary = "a file that is being written, or was left by a killed process"
        what = SMALL.get(found.name) or (temporary if fnmatchcase(found.name, TEMPORARY) else None)

        if what is not None and stat.S_ISREG(info.st_mode):
            yield Entry("other", Path(found.path), info.st_size, info.st_mtime, KEPT, facts={"what": what})
        else:
            yield _foreign("other", Path(found.path), info, "a link" if found.is_symlink() else "not made by scoremode")


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be read ({error.strerror})", fix="set SCOREMODE_CACHE to a folder of your own"
        ) from None


def inspect_entry(kind: str, path: Path) -> Entry:
    """One entry as it is now, judged only by names, sizes and times."""
    try:
        info = path.lstat()
        if kind == "logs":
            ours = stat.S_ISREG(info.st_mode) and LOG.fullmatch(path.name)
            return Entry(kind, path, info.st_size, info.st_mtime, FINISHED) if ours else _foreign(kind, path, info)
        if not stat.S_ISDIR(info.st_mode):
            return _foreign(kind, path, info, "a link" if stat.S_ISLNK(info.st_mode) else "not a folder")
        if LEFTOVER.fullmatch(path.name):
            files = _files(path)
            return Entry(kind, path, _size(files), info.st_mtime, REMOVED, "its deletion was interrupted")
        inspect = {"models": _model, "tasks": _answers, "texts": _tokens, "files": _copy}.get(kind)
        return inspect(path, info) if inspect else _run(kind, path, info)
    except OSError as error:
        return Entry(kind, path, 0, 0.0, FOREIGN, f"cannot be read ({error.strerror})")


def _foreign(kind: str, path: Path, info: os.stat_result, note: str = "not made by scoremode") -> Entry:
    return Entry(kind, path, 0, info.st_mtime, FOREIGN, note)


def _run(kind: str, path: Path, info: os.stat_result) -> Entry:
    if not DIGEST.fullmatch(path.name):
        return _foreign(kind, path, info)
    files = _files(path, deep=False)
    strange = sorted(name for name, found in files.items() if not (stat.S_ISREG(found.st_mode) and _is_ours(name)))
    if strange:
        return _foreign(kind, path, info, f"contains {harmless(strange[0])}")
    telling = files.keys() & {MANIFEST, JOURNAL} or files.keys() - {LOCK}  # a lock file changes the folder's own time
    used = max((files[name].st_mtime for name in telling), default=info.st_mtime)
    entry = Entry(kind, path, _size(files), used, UNFINISHED)
    if MANIFEST in files:
        whole = SCORES in files and (kind != "references" or REFERENCE in files)
        return replace(entry, state=FINISHED if whole else DAMAGED, note="" if whole else "files are missing")
    if JOURNAL not in files and files.keys() - {LOCK}:
        return replace(entry, state=DAMAGED, note=f"has neither {MANIFEST} nor {JOURNAL}")
    return entry


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, SCORES, JOURNAL, LOCK, PLACE) or is_own_name(name) or fnmatchcase(name, TEMPORARY)


def _model(path: Path, info: os.stat_result) -> Entry:
    files = _files(path)
    if MODEL_MARK in files:
        try:
            made = read_object(path / MODEL_MARK)
        except ValueError:
            made = {}
        if {"source", "sha256", "conversion"} <= made.keys():
            facts = {"what": f"converted from {made['source']}"} if sealed.text(made["source"]) else {}
            return Entry("models", path, _size(files), files[MODEL_MARK].st_mtime, FINISHED, facts=facts)
    elif CONVERSION.fullmatch(path.name) and all(name.split(os.sep)[0] == "model" for name in files):
        newest = max([info.st_mtime, *(found.st_mtime for found in files.values())])
        return Entry("models", path, _size(files), newest, UNFINISHED, "its conversion was interrupted")
    return _foreign("models", path, info)


def _answers(path: Path, info: os.stat_result) -> Entry:
    files = _files(path, deep=False)
    ours = DIGEST.fullmatch(path.name) and all(stat.S_ISREG(found.st_mode) for found in files.values())
    if not ours or files.keys() - {ANSWERS, LOCK}:
        return _foreign("tasks", path, info)
    used = files[ANSWERS].st_mtime if ANSWERS in files else info.st_mtime
    return Entry("tasks", path, _size(files), used, FINISHED)


def _tokens(path: Path, info: os.stat_result) -> Entry:
    files = _files(path, deep=False)
    ours = DIGEST.fullmatch(path.name) and all(stat.S_ISREG(found.st_mode) for found in files.values())
    known = all(name in (TOKENS_MARK, LOCK) or COLUMN.fullmatch(name) or fnmatchcase(name, TEMPORARY) for name in files)
    if not ours or not known:
        return _foreign("texts", path, info)
    newest = max([found.st_mtime for name, found in files.items() if name != LOCK], default=info.st_mtime)
    if TOKENS_MARK not in files:
        return Entry("texts", path, _size(files), newest, UNFINISHED, "its text was not read to the end")
    return Entry("texts", path, _size(files), files[TOKENS_MARK].st_mtime, FINISHED)


def _copy(path: Path, info: os.stat_result) -> Entry:
    files = _files(path, deep=False)
    ours = DIGEST.fullmatch(path.name) and all(stat.S_ISREG(found.st_mode) for found in files.values())
    if ours and PLACE in files:  # results on their way elsewhere
        newest = max(found.st_mtime for found in files.values())
        return Entry("files", path, _size(files), newest, FINISHED, facts={"what": "results that go elsewhere"})
    if not ours or len([name for name in files if not name.startswith(".")]) > 1:
        return _foreign("files", path, info)
    if FILE_MARK not in files:
        return Entry("files", path, _size(files), info.st_mtime, UNFINISHED, "it was not fetched completely")
    try:
        where = read_object(path / FILE_MARK).get("place")
    except ValueError:
        where = None
    facts = {"what": f"copy of {where}"} if sealed.text(where) else {}
    return Entry("files", path, _size(files), files[FILE_MARK].st_mtime, FINISHED, facts=facts)


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


# ── describe ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def described(entry: Entry) -> Entry:
    """The entry with the facts in its manifest or journal. Nothing is hashed, so an edited file is not noticed."""
    if entry.kind not in ("runs", "references") or entry.state not in (FINISHED, UNFINISHED):
        describe = {"tasks": _described_by_answers, "texts": _described_tokens}.get(entry.kind)
        return describe(entry) if describe and entry.state == FINISHED else entry
    try:
        if entry.state == UNFINISHED:
            return _described_by_journal(entry)
        manifest = read_object(entry.path / MANIFEST)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return replace(entry, state=DAMAGED, note=harmless(f"{MANIFEST}: {reason}"))
    known = manifest.get("format")
    if type(known) is not int or not isinstance(manifest.get("identity"), dict):
        return replace(entry, state=DAMAGED, note=f"{MANIFEST}: not a run's")
    if known != FORMAT:
        return replace(entry, state=OUTDATED, note=f"written in format {known}, this scoremode reads {FORMAT}")
    facts = {name: manifest.get(name) for name in ("model", "corpus", "method", "engine", "dtype")}
    against = manifest.get("against")
    facts["against"] = against.get("model") if isinstance(against, dict) else None
    targets = manifest.get("targets")
    return replace(entry, facts={**_texts(facts), "targets": targets if type(targets) is int else None})


def _described_by_journal(entry: Entry) -> Entry:
    """The entry with its run's identity, which has fingerprints but no names."""
    path = entry.path / JOURNAL
    if not path.exists():
        return replace(entry, note="nothing was scored yet")
    known = read_record_header(path) or {}
    identity = known.get("identity")
    if not isinstance(identity, dict):
        return replace(entry, state=DAMAGED, note=f"{JOURNAL}: its first line cannot be read")
    return replace(entry, facts=_texts({name: identity.get(name) for name in ("model", "corpus", "engine")}))


def _described_by_answers(entry: Entry) -> Entry:
    """The entry with the fingerprint of the model that answered."""
    try:
        identity = (read_record_header(entry.path / ANSWERS) or {}).get("identity")
    except OSError:
        identity = None
    known = identity if isinstance(identity, dict) else {}
    return replace(entry, facts={"what": "answers", **_texts({name: known.get(name) for name in ("model", "engine")})})


def _described_tokens(entry: Entry) -> Entry:
    """The entry with the hash of its text."""
    try:
        key = read_object(entry.path / TOKENS_MARK).get("key")
    except (OSError, ValueError) as error:
        return replace(entry, state=DAMAGED, note=harmless(f"{TOKENS_MARK}: {error}"))
    known = key if isinstance(key, dict) else {}
    return replace(entry, facts={"what": "tokens", **_texts({"corpus": known.get("corpus")})})


def _texts(found: dict[str, Any]) -> dict[str, str | None]:
    """The values that are printable text; others become None, because the files are not trusted."""
    return {name: value if sealed.text(value) else None for name, value in found.items()}
