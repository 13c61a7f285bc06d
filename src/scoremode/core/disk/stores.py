"""What is asked of files and folders behind URIs. A wing offers it as its "store"; without one, a URI is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoremode.core import extensions
from scoremode.core.disk.uri import RemotePath, located, stored_at
from scoremode.errors import InputError


@dataclass(frozen=True, slots=True)
class Store:
    """What a store of files behind URIs can do. Copies lie in the cache; all errors are ScoremodeErrors."""

    has_file: Callable[[RemotePath], bool]
    """Is there a file?"""

    read: Callable[[RemotePath, int], bytes | None]
    """The first bytes of a file, at most so many; None if there is no such file."""

    write: Callable[[RemotePath, bytes], None]
    """Writes a file whole."""

    problem_with_output: Callable[[RemotePath], str | None]
    """Why no file may be written there, as in "is a folder"; None if one may."""

    copy_of_file: Callable[[RemotePath], Path]
    """A copy of a file as it is now."""

    copies_of_texts: Callable[[RemotePath, tuple[str, ...]], list[Path]]
    """Copies of a file, of the files that match a pattern, or of those in a folder with one of these endings."""

    copy_of_run: Callable[..., Path]
    """Of a place: a folder with a copy of a finished run; with ``states``, of the files of its reference too."""

    claim: Callable[..., Any]
    """Of a place, an identity, ``fresh`` and ``kind``: a ``Claim`` (store/runs.py) that sends the finished run."""


def store_of(place: RemotePath) -> Store:
    """What reads and writes a place; InputError if that part of scoremode is not installed."""
    stores = extensions.offered("store")
    if not stores:
        raise InputError(
            f"{place} cannot be used: this installation of scoremode has no part for URIs",
            fix="give a file or folder of this machine",
        )
    store: Store = stores[0]
    return store


def is_there(location: str | os.PathLike[str] | RemotePath, name: str) -> bool:
    """Does a folder, here or behind a URI, contain a file of that name?"""
    where = stored_at(location)
    if isinstance(where, RemotePath):
        return store_of(where).has_file(where / name)
    return (where / name).is_file()


def local_file(location: str | os.PathLike[str]) -> Path:
    """The file that a path or a URI names, or its copy."""
    where = located(location)
    return store_of(where).copy_of_file(where) if isinstance(where, RemotePath) else where
