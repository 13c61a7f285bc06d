"""The candidates that a user named ─▶ models and runs: patterns and folders of several models are expanded.

quants/*.gguf    every model that matches; a shell may have expanded the pattern already
quants/          the models and runs in a folder, if the folder is not a model or a run itself

A split GGUF file is one model, named by its first part. Projectors of images (mmproj…) are left out, with a line.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scoremode.core.arguments import path_text
from scoremode.core.disk.folders import MANIFEST
from scoremode.core.disk.uri import is_uri
from scoremode.core.models.gguf import SPLIT, SUFFIX, gguf_models
from scoremode.core.models.names import reader_of
from scoremode.errors import InputError

logger = logging.getLogger(__name__)

SIGNS = "*?["
PROJECTOR = "mmproj"


def expand_candidates(given: Sequence[str | os.PathLike[str]], baseline: str = "") -> list[str]:
    """The candidates by name, in the order given; those of a pattern or a folder are sorted by name.

    A pattern of the hub does not name the baseline.
    """
    typed = [path_text("a candidate", one) for one in given]
    names = [name for one in typed for name in _expanded(one, baseline)]
    projectors = [name for name in names if Path(name).name.startswith(PROJECTOR) and name.endswith(SUFFIX)]
    for name in projectors:
        logger.warning("%s is left out: it is a projector of images, not a model", name)
    return list(_first_parts((name for name in names if name not in projectors), typed))


def _expanded(name: str, baseline: str) -> list[str]:
    path, reader = Path(name).expanduser(), reader_of(name)
    if reader is not None:
        return reader.expand(name, baseline)
    if is_uri(name) or path.is_file():
        return [name]
    if path.is_dir():
        return [name] if _is_candidate(path) else _inside(name, path)
    if not any(sign in name for sign in SIGNS):
        return [name]
    found = sorted(glob.glob(str(path)))
    models = [one for one in found if one.endswith(SUFFIX) or _is_candidate(Path(one))]
    if not models:
        what = f"{len(found)} files match the pattern {name}, and none is a model or a run" if found else None
        raise InputError(
            what or f"no file matches the pattern {name}", fix="check the pattern; models are *.gguf files and folders"
        )
    if left_out := len(found) - len(models):
        logger.warning("%d of the files that match %s are left out: they are neither models nor runs", left_out, name)
    return models


def _is_candidate(folder: Path) -> bool:
    """Is this the folder of one model or of one run?"""
    if not folder.is_dir():
        return False
    if any((folder / name).exists() for name in ("config.json", MANIFEST)):
        return True
    return len(gguf_models(folder)) == 1 and not any(map(_is_candidate, _folders_in(folder)))


def _inside(name: str, folder: Path) -> list[str]:
    """The models and runs in a folder; the folder itself if there are none, so that the engine says what is wrong."""
    files, folders = gguf_models(folder), [one for one in _folders_in(folder) if _is_candidate(one)]
    found = sorted(str(Path(name) / one.name) for one in (*files, *folders))
    return found or [name]


def _folders_in(folder: Path) -> list[Path]:
    return [one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")]


def _first_parts(names: Iterable[str], typed: Sequence[str]) -> Iterator[str]:
    """Yields the names without the other parts of a split model and without those that two patterns share.

    A name that the user typed twice stays, so that it is refused.
    """
    seen: set[str] = set()
    for name in names:
        split = SPLIT.match(name)
        model = name if split is None else f"{split[1]}-of-{split[3]}"
        if model not in seen or (split is None and typed.count(name) > 1):
            seen.add(model)
            yield name
