"""Where the cache folder is."""

from __future__ import annotations

import os
from pathlib import Path

from scoremode.errors import OptionError
from scoremode.places.uri import ALMOST_URI

SET_IT = "set SCOREMODE_CACHE to a folder that can be written"


def cache_folder() -> Path:
    """``$SCOREMODE_CACHE``, else ``$XDG_CACHE_HOME/scoremode``, else ``~/.cache/scoremode``."""
    try:
        if chosen := os.environ.get("SCOREMODE_CACHE"):
            if ALMOST_URI.match(chosen):
                raise OptionError("SCOREMODE_CACHE is a URI, and the cache is a folder of this machine", fix=SET_IT)
            return Path(chosen).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "scoremode"
    except RuntimeError:  # this user has no home
        raise OptionError("there is no home folder for the cache", fix=SET_IT) from None


def give_another(folder: Path) -> str:
    """What to do if a folder for results cannot be used: the user named it, or it is in the cache."""
    return SET_IT if folder.is_relative_to(cache_folder()) else "give another --out"
