"""Finished runs and references elsewhere, read from a copy in the cache: each machine fetches each file once.

A copy's folder is named after the manifests that it belongs to, so a run that was replaced has another folder. Every
file is checked against the sha256 in its manifest before it gets its name. A run's manifest comes after its columns;
the hidden states and the head of a reference come later, each file when its rows are first needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from scoremode.core.cache.entries import mark_used
from scoremode.core.cache.eviction import cache_limit, make_room
from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import HEAD, MANIFEST, REFERENCE, SCORES, SHARD_NAME, cache_folder
from scoremode.core.disk.stores import FetchFile
from scoremode.core.disk.uri import Place
from scoremode.core.strict_json import parse
from scoremode.errors import RunError, StorageError, alias_path, harmless
from scoremode.remote.storage.copies import AGAIN, fetch_once, fetch_verified
from scoremode.remote.storage.lock import LOCK_OBJECT
from scoremode.remote.storage.objects import Objects

LARGEST_MANIFEST = 256 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")
OWN_NAME = re.compile(f"{SHARD_NAME.pattern}|{re.escape(HEAD)}|{re.escape(SCORES)}")

Manifests = dict[str, bytes]


def copy_of_run(place: Place) -> tuple[Path, FetchFile]:
    """The folder with a copy of a finished run, which is fetched if it is not here yet.

    Of a reference, the hidden states and the head may be missing: the function fetches those that are needed.
    """
    objects = Objects(place)
    manifests = read_manifests(objects)
    if MANIFEST not in manifests:
        if objects.look(LOCK_OBJECT) is not None:
            raise RunError(f"{place} has no finished run yet", fix="run the command that makes it, or wait for it")
        raise RunError(f"{place} is not a run", fix="give a folder that was written with --out; check the URI")
    folder = copy_folder(manifests)
    if not (folder / MANIFEST).exists():
        cache_limit()  # raises if the limit is invalid
        fetch_once(folder, MANIFEST, place, lambda: _fetch_columns(objects, manifests, folder))
        make_room(folder)
    mark_used(folder)
    alias_path(str(folder), str(place))

    def fetch(name: str, size: int, sha256: str) -> None:
        fetch_once(folder, name, place, lambda: fetch_verified(objects, name, folder / name, size=size, sha256=sha256))

    return folder, fetch


def read_manifests(objects: Objects) -> Manifests:
    """The manifests of a run and of a reference, as far as they exist."""
    found = {name: objects.read(name, most=LARGEST_MANIFEST) for name in (MANIFEST, REFERENCE)}
    return {name: data for name, data in found.items() if data is not None}


def copy_folder(manifests: Manifests) -> Path:
    digest = hashlib.sha256()
    for name, data in sorted(manifests.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return cache_folder() / ("references" if REFERENCE in manifests else "runs") / digest.hexdigest()[:20]


def files_in(manifests: Manifests, place: Place) -> Iterator[tuple[str, str]]:
    """Names and hashes of the files that manifests list. Names are fixed: nothing can point elsewhere."""
    for manifest in (REFERENCE, MANIFEST) if REFERENCE in manifests else (MANIFEST,):
        problem = "no usable scores_sha256" if manifest == MANIFEST else "no usable list of files"
        try:
            known = parse(manifests[manifest])
            if manifest == MANIFEST:
                files = [(SCORES, str(known["scores_sha256"]))]
            else:
                files = [(str(entry["file"]), str(entry["sha256"])) for entry in (*known["shards"], known["head"])]
            if not all(OWN_NAME.fullmatch(name) and SHA256.fullmatch(sha256) for name, sha256 in files):
                raise ValueError(problem)
        except (ValueError, LookupError, TypeError) as error:
            words = harmless(str(error)) if isinstance(error, ValueError) else problem
            raise RunError(f"{place / manifest} is damaged ({words})", fix=AGAIN) from None
        yield from files


def present_files(objects: Objects, manifests: Manifests) -> list[tuple[str, str, int]]:
    """Names, hashes and sizes of the files that manifests list; StorageError if one is missing."""
    sizes = {found.name: found.size for found in objects.listed()}
    files = list(files_in(manifests, objects.place))
    for name, _ in files:
        if name not in sizes:
            raise StorageError(f"{objects.place / name} is missing", fix=AGAIN)
    return [(name, sha256, sizes[name]) for name, sha256 in files]


def _fetch_columns(objects: Objects, manifests: Manifests, folder: Path) -> None:
    for name, sha256, size in present_files(objects, manifests):
        if name == SCORES:
            fetch_verified(objects, name, folder / name, size=size, sha256=sha256)
    for name in (REFERENCE, MANIFEST):
        if name in manifests:
            write_atomically(folder / name, manifests[name])
