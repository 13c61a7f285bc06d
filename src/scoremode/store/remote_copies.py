"""Finished runs and references elsewhere, read from a copy in the cache: each machine fetches one once.

A copy's folder is named after the manifests that it belongs to, so a run that was replaced has another folder. One
process fetches, under a lock; others wait for it and share the copy. Every file is checked against the sha256 in its
manifest before it gets its name, and the manifest comes last. A file that was fetched in part goes on where it ended.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from scoremode.cache.entries import mark_used
from scoremode.cache.eviction import cache_limit, make_room
from scoremode.disk.files import file_sha256, write_atomically
from scoremode.disk.folders import HEAD, LOCK, MANIFEST, REFERENCE, SCORES, SHARD_NAME, TEMPORARY, cache_folder
from scoremode.disk.locks import hold_lock
from scoremode.errors import RunError, StorageError, call, harmless
from scoremode.places.objects import Objects
from scoremode.places.uri import Place, located, may_be_stored
from scoremode.references.reader import Reference
from scoremode.store.segments import PARTIAL_FOLDER
from scoremode.strict_json import parse

T = TypeVar("T")

LARGEST_MANIFEST = 256 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")
AGAIN = "run the same command again; if it stays, make it again with --fresh"


def stored_at(given: str | os.PathLike[str] | Place) -> Path | Place:
    """Where a run or a reference lies. An http address is none: it may be the name of a model."""
    return located(given) if not isinstance(given, str) or may_be_stored(given) else Path(given)


def is_there(given: str | os.PathLike[str] | Place, name: str) -> bool:
    """Does a folder, here or elsewhere, contain a file of that name?"""
    where = stored_at(given)
    if isinstance(where, Place):
        found = Objects(where).look(name)
        return found is not None and not found.is_folder
    return (where / name).is_file()


def copy_of(place: Place) -> Path:
    """The copy of a finished run or reference; fetched if it is not here yet."""
    objects = Objects(place)
    return _copy(objects, _finished_manifests(objects))


def copy_of_run(place: Place) -> Path:
    """The same without the hidden states of a reference, unless they are here anyway."""
    objects = Objects(place)
    manifests = _finished_manifests(objects)
    if not (copy_folder(manifests) / MANIFEST).exists():
        manifests.pop(REFERENCE, None)
    return _copy(objects, manifests)


def _finished_manifests(objects: Objects) -> dict[str, bytes]:
    manifests = read_manifests(objects)
    if MANIFEST not in manifests:
        raise not_finished(objects)
    return manifests


def _copy(objects: Objects, manifests: dict[str, bytes]) -> Path:
    place, folder = objects.place, copy_folder(manifests)
    if not (folder / MANIFEST).exists():
        cache_limit()  # raises if the limit is invalid
        folder.mkdir(parents=True, exist_ok=True)
        waiting = f"another process is fetching {place}; waiting for it (Ctrl-C to stop)"
        with hold_lock(folder / LOCK, waiting=waiting):
            if not (folder / MANIFEST).exists():
                _fetch_all(objects, manifests, folder)
        make_room(folder)
    mark_used(folder)
    call(str(folder), str(place))
    return folder


def open_reference(given: str | os.PathLike[str] | Place) -> Reference:
    """The reference in a folder, or a copy of the one behind a URI, checked."""
    where = stored_at(given)
    return Reference.open(copy_of(where), place=where) if isinstance(where, Place) else Reference.open(where)


def read_manifests(objects: Objects) -> dict[str, bytes]:
    """The manifests of a run and of a reference, as far as they are there."""
    found = {name: objects.read(name, most=LARGEST_MANIFEST) for name in (MANIFEST, REFERENCE)}
    return {name: data for name, data in found.items() if data is not None}


def copy_folder(manifests: dict[str, bytes]) -> Path:
    """The folder in the cache for a run with these manifests."""
    digest = hashlib.sha256()
    for name, data in sorted(manifests.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return cache_folder() / ("references" if REFERENCE in manifests else "runs") / digest.hexdigest()[:20]


def not_finished(objects: Objects) -> RunError:
    if objects.listed(PARTIAL_FOLDER, deep=True):
        return RunError(f"{objects.place} contains an unfinished run", fix="run the same command again to resume")
    return RunError(f"{objects.place} is not a run", fix="give a folder that was written with --out; check the URI")


def check_files(place: Place) -> None:
    """RunError if a file of a finished reference elsewhere is missing. Nothing is fetched but manifests."""
    objects = Objects(place)
    present = {found.name for found in objects.listed()}
    for name, _ in _files_of(place, read_manifests(objects)):
        if name not in present:
            raise StorageError(f"{place / name} is missing", fix=AGAIN)


def _fetch_all(objects: Objects, manifests: dict[str, bytes], folder: Path) -> None:
    files = list(_files_of(objects.place, manifests))
    sizes = {found.name: found.size for found in objects.listed()}
    for name, _ in files:
        if name not in sizes:
            raise StorageError(f"{objects.place / name} is missing", fix=AGAIN)
    _remove_strange_parts(folder, [name for name, _ in files])
    for name, sha256 in files:
        _fetch_one(objects, name, sizes[name], sha256, folder)
    for name in (REFERENCE, MANIFEST):
        if name in manifests:
            write_atomically(folder / name, manifests[name])


def _files_of(place: Place, manifests: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """Names and hashes of the files that belong to manifests. Names are fixed: nothing can point elsewhere."""
    if REFERENCE in manifests:
        known = _parsed(place / REFERENCE, manifests[REFERENCE])
        shards = known.get("shards")
        entries = [*(shards if isinstance(shards, list) else [None]), known.get("head")]
        for entry in entries:
            name, sha256 = (entry.get("file"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not (name == HEAD or SHARD_NAME.fullmatch(name)) or not _is_hash(sha256):
                raise RunError(f"{place / REFERENCE} is damaged (no usable list of files)", fix=AGAIN)
            yield name, str(sha256)
    sha256 = _parsed(place / MANIFEST, manifests[MANIFEST]).get("scores_sha256")
    if not _is_hash(sha256):
        raise RunError(f"{place / MANIFEST} is damaged (no usable scores_sha256)", fix=AGAIN)
    yield SCORES, str(sha256)


def _parsed(place: Place, data: bytes) -> dict[str, Any]:
    try:
        found = parse(data)
    except ValueError as error:
        raise RunError(f"{place} is damaged ({harmless(str(error))})", fix=AGAIN) from None
    return found if isinstance(found, dict) else {}


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def _fetch_one(objects: Objects, name: str, size: int, sha256: str, folder: Path) -> None:
    """Fetch a file that is not here yet. Only its hash decides whether it is the right one."""
    if (folder / name).exists():  # it got its name only after its hash was checked
        return
    part = folder / _part_name(name)
    for _ in range(2):  # what an earlier process left may be of another file: then all of it is fetched again
        if part.exists() and part.stat().st_size > size:
            part.unlink()
        try:
            objects.fetch(name, part, size=size)
            if file_sha256(part) == sha256:
                os.replace(part, folder / name)
                return
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written ({error.strerror})", fix="free some space, or set SCOREMODE_CACHE"
            ) from None
        part.unlink()
    raise StorageError(f"{objects.place / name} is not the file that its manifest describes", fix=AGAIN)


def _part_name(name: str) -> str:
    """The name of a file that is fetched in part: the same for every process, so that the next one can go on."""
    return TEMPORARY.replace("*", hashlib.sha256(name.encode()).hexdigest()[:16])


def _remove_strange_parts(folder: Path, names: list[str]) -> None:
    known = {_part_name(name) for name in names}
    for path in folder.glob(TEMPORARY):
        if path.name not in known:
            with suppress(OSError):
                path.unlink()
