"""What the core asks of stores behind URIs, answered by this wing.

Results of pairs are written to a work folder here, and sent when they are complete:

URI                          the results
URI.manifest.json            the question and the sha256 of the results; sent before them
URI.lock.json                the process that is writing (lock.py)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scoremode.core.disk.folders import MANIFEST, SCORES, cache_folder
from scoremode.core.disk.stores import Store
from scoremode.core.disk.uri import RemotePath
from scoremode.core.store.runs import lock_folder
from scoremode.errors import StorageError, alias_path
from scoremode.remote.storage.copies import FILES, copies_of_texts, copy_of_file, copy_of_run
from scoremode.remote.storage.lock import LOCK_OBJECT, RemoteLock
from scoremode.remote.storage.objects import Objects
from scoremode.remote.storage.runs import STAYS, RemoteClaim


@contextmanager
def worked_on_here(place: RemotePath, _fresh: bool) -> Iterator[Path]:
    """Yields a local file to write instead of a URI, and sends it at the end."""
    folder = cache_folder() / FILES / hashlib.sha256(str(place).encode()).hexdigest()[:20]
    path, objects = folder / place.name, Objects(place.parent)
    here = [path.with_name(path.name + ending) for ending in (".manifest.json", "", ".partial")]
    lock = lock_folder(folder, waits=False, name=str(place))
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


def has_file(place: RemotePath) -> bool:
    found = Objects(place.parent).look(place.name)
    return found is not None and not found.is_folder


def read(place: RemotePath, most: int) -> bytes | None:
    return Objects(place.parent).read(place.name, most=most)


def write(place: RemotePath, data: bytes) -> None:
    Objects(place.parent).write(place.name, data)


def problem_with_output(place: RemotePath) -> str | None:
    """The server must answer now; whether this user may write shows only later."""
    beside = {found.name: found for found in Objects(place.parent).listed()}
    if place.name in beside and beside[place.name].is_folder:
        return "is a folder"
    if {MANIFEST, SCORES} <= beside.keys() or LOCK_OBJECT in beside:
        return "is inside a run or reference folder, where nothing else may be written"
    return None


STORE = Store(
    has_file=has_file,
    read=read,
    write=write,
    problem_with_output=problem_with_output,
    copy_of_file=copy_of_file,
    copies_of_texts=copies_of_texts,
    copy_of_run=copy_of_run,
    claim=RemoteClaim,
    worked_on_here=worked_on_here,
)
