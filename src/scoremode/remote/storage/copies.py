"""Copies of what lies behind URIs, in the cache. One process of a machine fetches a copy; the others wait and share it.

CACHE/files/DIGEST/NAME         a text or a file of base logits; DIGEST is a hash of the URI and the file's version
CACHE/files/DIGEST/.file.json   the origin of the copy, and its sha256; written last
CACHE/runs/DIGEST               a finished run, or a reference; DIGEST is a hash of its manifests

A file that was changed gets another version from its server, and so another copy. Every file of a run is checked
against the sha256 in its manifest before it gets its name. A run's manifest comes after its columns; the hidden states
and the head of a reference come later, each file when its rows are first needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from scoremode.core.cache.entries import cache_limit, hold_entry, make_room, mark_used
from scoremode.core.disk.files import file_sha256, write_atomically
from scoremode.core.disk.folders import FILE_MARK, HEAD, LOCK, MANIFEST, REFERENCE, SCORES, SHARD_NAME, cache_folder
from scoremode.core.disk.locks import hold_lock
from scoremode.core.disk.uri import RemotePath
from scoremode.core.strict_json import parse
from scoremode.errors import CorpusError, RunError, StorageError, alias_path
from scoremode.remote.storage.objects import Objects

FILES, PART = "files", ".scoremode-part.tmp"
LOCK_OBJECT = "lock.json"  # see runs.py
SIGNS = "*?["
AGAIN = "run the same command again; if it stays, make it again with --fresh"


# ── fetch ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def fetch_once(folder: Path, mark: str, place: RemotePath, fetch: Callable[[], None]) -> None:
    """Calls ``fetch``, which writes the file ``mark`` last, if ``mark`` is missing; waits if another process does."""
    waiting = f"another process is fetching {place}; waiting for it (Ctrl-C to stop)"
    try:
        if not (folder / mark).exists():
            with hold_lock(folder / LOCK, waiting=waiting):
                if not (folder / mark).exists():
                    fetch()
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror})", fix="free some space, or set SCOREMODE_CACHE"
        ) from None


def fetch_verified(objects: Objects, name: str, to: Path, *, sha256: str) -> None:
    """Fetches a file, which gets its final name after its hash was checked."""
    if to.exists():
        return
    part = to.with_name(PART)
    part.unlink(missing_ok=True)  # it may be a link or a FIFO
    objects.fetch(name, part)
    if file_sha256(part) != sha256:
        part.unlink()
        raise StorageError(f"{objects.place / name} is not the file that its manifest describes", fix=AGAIN)
    os.replace(part, to)


def copy_of_file(place: RemotePath) -> Path:
    """Returns the path of a copy of this file as it is now; raises StorageError if there is no such file."""
    objects, name = (Objects(place.parent), place.name) if "/" in place.path else (Objects(place), "")
    version = objects.version(name)
    if version is None:
        raise StorageError(f"there is no file {place}", fix="check the URI and who may read it")
    folder = (
        cache_folder() / FILES / hashlib.sha256(f"{place}\0{version}".encode("utf-8", "surrogatepass")).hexdigest()[:20]
    )
    copy = folder / re.sub(r"^\.|[^\w.,+=@() -]", "_", place.name)  # names with a dot are ours

    def fetch() -> None:
        part = folder / PART
        part.unlink(missing_ok=True)
        objects.fetch(name, part)
        if objects.version(name) != version:
            part.unlink()
            raise StorageError(f"{place} was changed while it was read", fix="run the same command again")
        origin = {"place": str(place), "version": version, "size": part.stat().st_size, "sha256": file_sha256(part)}
        os.replace(part, copy)
        write_atomically(folder / FILE_MARK, json.dumps(origin).encode())

    fetch_once(folder, FILE_MARK, place, fetch)
    hold_entry(folder)  # the copy is not removed while this process lives
    alias_path(str(copy), str(place))
    return copy


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def copies_of_texts(place: RemotePath, endings: tuple[str, ...]) -> list[Path]:
    """Returns paths of copies of the texts at a place (file, folder or pattern), sorted by their names there."""
    places = _texts_at(place, endings)
    if not places:
        raise CorpusError(
            f"there is no text at {place}",
            fix=f"check the address; only files that end in {' '.join(endings)} are read from a folder",
        )
    return [copy_of_file(file) for file in places]


def _texts_at(place: RemotePath, endings: tuple[str, ...]) -> list[RemotePath]:
    """Returns the files that match a pattern, or those of a folder with one of the endings; else the file itself."""
    from fsspec.utils import glob_translate

    parts = place.path.split("/")
    first = next((i for i, part in enumerate(parts) if i and any(sign in part for sign in SIGNS)), len(parts))
    folder, pattern = RemotePath(place.scheme, "/".join(parts[:first]), place.settings), "/".join(parts[first:])
    objects = Objects(folder)
    if not pattern and not objects.is_folder():
        return [folder]
    names = [name for name, is_folder in objects.listed(deep=True).items() if not is_folder]
    if not re.search(r"(^|/)\.", pattern):  # hidden files must be asked for
        names = [name for name in names if not re.search(r"(^|/)\.", name)]
    if not pattern:
        return [folder / name for name in names if name.lower().endswith(endings)]
    return [folder / name for name in names if re.match(glob_translate(pattern), name)]


# ── runs and references ──────────────────────────────────────────────────────────────────────────────────────────────
LARGEST_MANIFEST = 256 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")
OWN_NAME = re.compile(f"{SHARD_NAME.pattern}|{re.escape(HEAD)}|{re.escape(SCORES)}")

Manifests = dict[str, bytes]


def copy_of_run(place: RemotePath, *, states: bool = False) -> Path:
    """The folder with a copy of a finished run, which is fetched if it is not here yet.

    Of a reference, the hidden states and the head are fetched only with ``states``.
    """
    objects = Objects(place)
    manifests = read_manifests(objects)
    if MANIFEST not in manifests:
        if objects.is_folder(LOCK_OBJECT) is not None:
            raise RunError(f"{place} has no finished run yet", fix="run the command that makes it, or wait for it")
        raise RunError(f"{place} is not a run", fix="give a folder that was written with --out; check the URI")
    folder = copy_folder(manifests)

    def fetch(names: Iterable[str]) -> None:
        files = present_files(objects, manifests)
        for name in names:
            fetch_verified(objects, name, folder / name, sha256=files[name])

    def fetch_columns() -> None:
        fetch([SCORES])
        for name in sorted(manifests, key=lambda name: name == MANIFEST):
            write_atomically(folder / name, manifests[name])

    if not (folder / MANIFEST).exists():
        cache_limit()  # raises if the limit is invalid
        fetch_once(folder, MANIFEST, place, fetch_columns)
        make_room(folder)
    mark_used(folder)
    alias_path(str(folder), str(place))
    for name in files_in(manifests, place) if states else ():
        fetch_once(folder, name, place, partial(fetch, [name]))
    return folder


def read_manifests(objects: Objects) -> Manifests:
    """The manifests of a run and of a reference, as far as they exist."""
    contents = {name: objects.read(name, most=LARGEST_MANIFEST) for name in (MANIFEST, REFERENCE)}
    return {name: data for name, data in contents.items() if data is not None}


def copy_folder(manifests: Manifests) -> Path:
    digest = hashlib.sha256()
    for name, data in sorted(manifests.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return cache_folder() / ("references" if REFERENCE in manifests else "runs") / digest.hexdigest()[:20]


def files_in(manifests: Manifests, place: RemotePath) -> dict[str, str]:
    """The hashes of the files that manifests list. Names are fixed: nothing can point elsewhere."""
    try:
        files = {SCORES: parse(manifests[MANIFEST])["scores_sha256"]}
        if REFERENCE in manifests:
            reference = parse(manifests[REFERENCE])
            files |= {entry["file"]: entry["sha256"] for entry in (*reference["shards"], reference["head"])}
        if all(OWN_NAME.fullmatch(name) and SHA256.fullmatch(sha256) for name, sha256 in files.items()):
            return files
    except (ValueError, LookupError, TypeError):
        pass
    raise RunError(f"{place} is damaged: its manifests do not list its files", fix=AGAIN)


def present_files(objects: Objects, manifests: Manifests) -> dict[str, str]:
    """The hashes of the files that manifests list, by name; StorageError if one is missing."""
    files, listed = files_in(manifests, objects.place), objects.listed()
    for name in files:
        if name not in listed:
            raise StorageError(f"{objects.place / name} is missing", fix=AGAIN)
    return files
