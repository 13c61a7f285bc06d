"""Results of pairs behind a URI: written to a work folder here, and sent when they are complete.

URI                          the results
URI.manifest.json            the question and the sha256 of the results; sent before them
URI.lock.json                the process that is writing (lock.py)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scoremode.core.disk.folders import cache_folder
from scoremode.core.disk.uri import Place
from scoremode.core.store.runs import lock_folder
from scoremode.errors import StorageError, alias_path
from scoremode.remote.storage.copies import FILES
from scoremode.remote.storage.lock import LOCK_OBJECT, RemoteLock
from scoremode.remote.storage.objects import Objects
from scoremode.remote.storage.runs import STAYS


@contextmanager
def worked_on_here(place: Place, _fresh: bool) -> Iterator[Path]:
    """Yields a local file to write instead of a URI, and sends it at the end."""
    folder = cache_folder() / FILES / hashlib.sha256(str(place).encode()).hexdigest()[:20]
    path, objects = folder / place.name, Objects(place.parent)
    here = [path.with_name(path.name + ending) for ending in (".manifest.json", "", ".partial")]
    lock, _ = lock_folder(folder, waits=False, name=str(place))
    remote_lock = RemoteLock(place, objects, f"{place.name}.{LOCK_OBJECT}", folder)
    try:
        alias_path(str(path), str(place))
        resumes = remote_lock.is_ours() and any(one.exists() for one in here)
        if not resumes and objects.look(path.name) is not None:
            for one in here:  # older than what lies there
                one.unlink(missing_ok=True)
        remote_lock.acquire()
        fetched = None if resumes else _fetch_results(objects, path)
        yield path
        if fetched != _version(path):
            remote_lock.stays = True
            try:
                objects.remove(path.name)  # so that the results there are never another manifest's
                for one in here[:2]:
                    objects.send(one.name, one)
            except StorageError as error:
                raise StorageError(f"the results are complete, but {error.message}", fix=STAYS) from None
            remote_lock.stays = False
    finally:
        remote_lock.release()
        lock.release()


def _fetch_results(objects: Objects, path: Path) -> tuple[int, int] | None:
    """Fetches finished results and their manifest; returns the version of their file, None if there are no results."""
    sizes = {found.name: found.size for found in objects.listed() if not found.is_folder}
    if path.name not in sizes:
        return None
    for name in {f"{path.name}.manifest.json", path.name} & sizes.keys():
        path.with_name(name).unlink(missing_ok=True)
        objects.fetch(name, path.with_name(name), size=sizes[name])
    return _version(path)


def _version(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
