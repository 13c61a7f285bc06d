"""Files and folders behind URIs. A wing offers the store that has them; without one, a URI is refused."""

from __future__ import annotations

import os
from pathlib import Path

from scoremode.core.disk.uri import RemotePath, located, stored_at
from scoremode.core.extensions import Store, StoreOffer, offered
from scoremode.errors import InputError


def store_of(place: RemotePath) -> Store:
    """What reads and writes a place; InputError if that part of scoremode is not installed."""
    stores = offered(StoreOffer)
    if not stores:
        raise InputError(
            f"{place} cannot be used: this installation of scoremode has no part for URIs",
            fix="give a file or folder of this machine",
        )
    return stores[0].load()


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
