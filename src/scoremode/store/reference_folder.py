"""The folder of a reference: is it one, may it be written, and how it is removed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scoremode.errors import RunError
from scoremode.store.files import write_atomically
from scoremode.store.reference_format import (
    FORMAT,
    HEAD,
    PARTIAL,
    REFERENCE,
    ROWS,
    SHARD_NAME,
    identity_in,
    is_own_name,
)
from scoremode.store.sealed import sealed


def is_reference(folder: Path) -> bool:
    """Does the folder contain a reference, finished or not, with a readable identity?"""
    return identity_in(folder) is not None


def discard(folder: Path) -> None:
    """Remove a reference's own files, finished or not; does nothing if there is none. The caller holds the lock.

    First, partial.reference.json is replaced by one that says that no rows are written; it is removed last. So after a
    kill the remaining files are still known to be ours, and the next writer starts from the beginning.
    """
    if not any((folder / name).exists() for name in (REFERENCE, PARTIAL, ROWS)):
        return
    nothing = {"format": FORMAT, "ready": False, "identity": identity_in(folder) or {}, "layout": {}}
    with suppress(OSError):  # a full disk must not prevent the removal
        write_atomically(folder / PARTIAL, json.dumps(sealed(nothing)).encode())
    for name in (REFERENCE, ROWS):
        (folder / name).unlink(missing_ok=True)
    for path in sorted(folder.iterdir(), key=lambda p: p.name == PARTIAL):
        if is_own_name(path.name):
            path.unlink(missing_ok=True)


def discard_others(folder: Path, identity: Mapping[str, Any]) -> None:
    """Remove the reference of another run, which a killed process left while it replaced that run."""
    if identity_in(folder) != identity:
        discard(folder)


def require_free(folder: Path) -> None:
    """Refuse a path that is a file, and a folder with files that have our names but are not ours."""
    if not folder.is_dir():
        if folder.exists():
            raise RunError(f"{folder} is a file", fix="give a folder to --out")
        return
    foreign = sorted(p.name for p in folder.iterdir() if p.name == HEAD or SHARD_NAME.fullmatch(p.name))
    if foreign and not any((folder / name).exists() for name in (REFERENCE, PARTIAL)):
        raise RunError(
            f"{folder} is not a reference: it contains {foreign[0]}", fix="give a new or empty folder to --out"
        )
