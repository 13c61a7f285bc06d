"""Files elsewhere, read from copies in the cache: texts, and files of base logits.

CACHE/files/DIGEST/NAME         the copy; DIGEST is made of the URI and of what the server says about the file's version
CACHE/files/DIGEST/.file.json   where it came from, and its sha256; written last

A file that was changed has another version, and so another copy. One process fetches; others wait and share.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from scoremode.disk.files import file_sha256, write_atomically
from scoremode.disk.folders import FILE_MARK, LOCK, USAGE, cache_folder
from scoremode.disk.locks import hold_lock, share_until_exit
from scoremode.errors import StorageError, call
from scoremode.places.objects import Objects
from scoremode.places.uri import Place

FILES, PART = "files", ".scoremode-part.tmp"
SIGNS = "*?["


def copy_of_file(place: Place) -> Path:
    """A copy of this file as it is now; StorageError if there is no such file."""
    objects = Objects(place.parent) if "/" in place.path else Objects(place)
    name = place.name if "/" in place.path else ""
    version = objects.version(name)
    if version is None:
        raise StorageError(f"there is no file {place}", fix="check the URI and who may read it")
    folder = cache_folder() / FILES / hashlib.sha256(f"{place}\0{version}".encode()).hexdigest()[:20]
    copy = folder / re.sub(r"[^\w.,+=@() -]", "_", place.name)
    waiting = f"another process is fetching {place}; waiting for it (Ctrl-C to stop)"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE_MARK).exists():
            with hold_lock(folder / LOCK, waiting=waiting):
                if not (folder / FILE_MARK).exists():
                    _fetch(objects, name, version, copy)
        with suppress(OSError):
            os.utime(folder / FILE_MARK)  # its last use
        share_until_exit(folder / FILE_MARK)  # the copy is not removed while this process lives
        call(str(copy), str(place))
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror})", fix="free some space, or set SCOREMODE_CACHE"
        ) from None
    return copy


def _fetch(objects: Objects, name: str, version: str, copy: Path) -> None:
    found = objects.look(name)
    part, place = copy.with_name(PART), objects.place / name if name else objects.place
    if found is None:
        raise StorageError(f"{place} was removed while it was read", fix="check the URI")
    if part.exists() and part.stat().st_size > found.size:
        part.unlink()
    part.touch()
    objects.fetch(name, part, size=found.size)
    if objects.version(name) != version:
        part.unlink()
        raise StorageError(f"{place} was changed while it was read", fix="run the same command again")
    sha256 = file_sha256(part)
    os.replace(part, copy)
    said = {"place": str(place), "version": version, "size": found.size, "sha256": sha256}
    write_atomically(copy.with_name(FILE_MARK), json.dumps(said).encode())
    with suppress(OSError):
        (cache_folder() / USAGE).unlink()  # the size of the cache is measured anew


def files_below(place: Place, endings: tuple[str, ...]) -> list[Place]:
    """The files of a folder with one of these endings, or those that match a pattern; the file itself if it is one."""
    before, pattern = _split_pattern(place)
    objects = Objects(before)
    if pattern is None:
        found = objects.look()
        if found is None or not found.is_folder:
            return [before]
    inside = [one.name for one in objects.listed(deep=True) if not one.is_folder]
    if pattern is None:
        hidden = re.compile(r"(^|/)\.")
        names = [name for name in inside if name.lower().endswith(endings) and not hidden.search(name)]
    else:
        names = [name for name in inside if _matches(name, pattern)]
    return [before / name for name in sorted(names)]


def _split_pattern(place: Place) -> tuple[Place, str | None]:
    parts = place.path.split("/")
    first = next((i for i, part in enumerate(parts) if i and any(sign in part for sign in SIGNS)), None)
    if first is None:
        return place, None
    return Place(place.scheme, "/".join(parts[:first]), place.settings), "/".join(parts[first:])


def _matches(name: str, pattern: str) -> bool:
    """As ``glob`` does: a star stands for names of one folder, two stars for any number of folders, none for a dot."""
    return _match_parts(name.split("/"), pattern.split("/"))


def _match_parts(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        shown = next((i for i, name in enumerate(names) if name.startswith(".")), len(names))
        return any(_match_parts(names[skip:], patterns[1:]) for skip in range(shown + 1))
    if not names or (names[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    return fnmatchcase(names[0], patterns[0]) and _match_parts(names[1:], patterns[1:])
