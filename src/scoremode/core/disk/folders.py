"""Where the cache folder is, and the names of the files in the folders of runs, references and cache entries.

The names stand here together, because ``own_files`` checks every folder for files that are not scoremode's before it is
changed. Such files are never replaced, with --fresh or without. Files that users name: core/verbs/outputs.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from scoremode.core.arguments import ALMOST_URI, user_path
from scoremode.errors import OptionError, RunError, harmless

LOCK = ".lock"  # while a process writes into the folder
TEMPORARY = re.compile(r"\.scoremode-[0-9a-f]{16}\.tmp")  # files that are still being written

MANIFEST, SCORES, JOURNAL = "manifest.json", "scores.parquet", "partial.journal"  # of a run
RESULTS = "results.jsonl"  # of pairs, beside a manifest and a journal
PLACE = ".place.json"  # in the work folder of a run behind a URI: that URI, and the id of the folder
ABOUT = ".about.json"  # in an entry of the cache that is not finished: what a user would call it

REFERENCE, HEAD = "reference.json", "head.safetensors"  # of a reference, beside the files of its run
ROWS = "partial.rows"
SHARD_NAME = re.compile(r"states-\d{5,}\.safetensors")

MODEL_MARK, FILE_MARK = "scoremode.json", ".file.json"
HASHES = "sha256.json"

SET_IT = "set SCOREMODE_CACHE to a folder that can be written"


def shard_name(shard: int) -> str:
    return f"states-{shard:05d}.safetensors"


def is_reference_file(name: str) -> bool:
    """Is this the name of a file that a reference adds to a run folder?"""
    return name in {REFERENCE, HEAD, ROWS} or SHARD_NAME.fullmatch(name) is not None


def cache_folder() -> Path:
    """``$SCOREMODE_CACHE``, else ``$XDG_CACHE_HOME/scoremode``, else ``~/.cache/scoremode``."""
    try:
        if chosen := os.environ.get("SCOREMODE_CACHE"):
            if ALMOST_URI.match(chosen):
                raise OptionError(
                    "SCOREMODE_CACHE is a URI, but the cache must be a folder of this machine", fix=SET_IT
                )
            return user_path(chosen)
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "scoremode"
    except RuntimeError:  # this user has no home
        raise OptionError("there is no home folder for the cache", fix=SET_IT) from None


def entry_folder(kind: str, identity: Mapping[str, object]) -> Path:
    """The cache folder of an entry; the same identity gives the same folder."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_folder() / kind / digest[:20]


def give_another(folder: Path) -> str:
    """The fix for a folder that cannot be used: another cache, or another --out if the user named the folder."""
    return SET_IT if folder.is_relative_to(cache_folder()) else "give another --out"


Mark = Callable[[Path], bool]


def own_files(folder: Path, kind: str, marks: Mapping[str, Mark]) -> set[str]:
    """Returns the names of the files in a folder. Raises RunError if scoremode did not make those with our names.

    ``marks`` has a check of the content for each of our names, and each file is checked by itself. Beside our files,
    other names are allowed.
    """
    try:
        present = {p.name for p in folder.iterdir() if not p.name.startswith(".")} if folder.exists() else set()
        plain = [name for name in present & marks.keys() if (folder / name).is_file()]
        # one without content may be replaced, whoever made it
        our_files = {name for name in plain if not (folder / name).stat().st_size or marks[name](folder / name)}
    except OSError as error:
        raise RunError(f"{folder} cannot be read ({error.strerror})", fix=give_another(folder)) from None
    foreign = (present & marks.keys() if our_files else present) - our_files
    if foreign:
        name = min(foreign, key=lambda name: (name in marks, name))
        damaged = ", or which is damaged" if name in marks else ""
        remove = f"remove that file, or {give_another(folder)}" if damaged else "give a new or empty folder to --out"
        message = f"{folder} is not {kind}: it contains {harmless(name)}, which scoremode did not make{damaged}"
        raise RunError(message, fix=remove)
    return present


def remove_files(folder: Path, names: Iterable[str], *, empty: bool = False) -> None:
    """Removes these files, and those that a killed process did not finish; with ``empty`` the folder too, if it is."""
    unfinished = [path.name for path in folder.glob(".*") if TEMPORARY.fullmatch(path.name) and path.is_file()]
    for path in (folder / name for name in (*names, *unfinished)):
        path.unlink(missing_ok=True)
    if empty:
        with suppress(OSError):  # somebody else's files are there
            folder.rmdir()
