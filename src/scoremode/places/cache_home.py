"""Where the cache folder is."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$SCOREMODE_CACHE``, else ``$XDG_CACHE_HOME/scoremode``, else ``~/.cache/scoremode``."""
    if chosen := os.environ.get("SCOREMODE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scoremode"
