"""Texts behind URIs: a file, a folder or a pattern of files ─▶ copies on this machine."""

from __future__ import annotations

from pathlib import Path

from scoremode.errors import CorpusError, InputError, StorageError
from scoremode.places.copies import SIGNS, copy_of_file, files_below
from scoremode.places.uri import located


def local_files(uri: str, endings: tuple[str, ...]) -> list[str]:
    """The files that a URI names, as paths of copies, sorted by their names elsewhere."""
    try:
        where = located(uri)
        if isinstance(where, Path):
            return [str(where)]
        places = files_below(where, endings)
        if not places:
            what = "no file matches the pattern" if any(sign in uri for sign in SIGNS) else "there is no text in"
            raise CorpusError(f"{what} {where}", fix=f"check it; files of a folder end in {' '.join(endings)}")
        return [str(copy_of_file(place)) for place in places]
    except (InputError, StorageError) as error:
        raise CorpusError(error.message, fix=error.fix) from None
