"""The harness's cache of answers, ``--use_cache``, for one model only.

Its keys are the texts of a request, not the model: one file used for two models gives the first one's answers for
both. So a file beside it says whose answers they are, and no other model may use them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scoremode.disk.files import write_atomically
from scoremode.errors import RunError
from scoremode.strict_json import parse, read_object

KIND = "scoremode answers for lm-eval"


def owner_file(database: Path) -> Path:
    """The file that says whose answers a database holds."""
    return database.with_name(database.name + ".scoremode.json")


def claim(database: Path, answers: int, identity: Mapping[str, Any]) -> None:
    """Make the database this model's, if it has no answers yet; refuse it if they are another's or nobody knows."""
    owner = owner_file(database)
    wanted = dict(parse(json.dumps(identity)))  # tuples are lists there, and must compare equal
    if not owner.exists():
        if answers:
            raise RunError(
                f"{database} holds {answers} answers of a model that is not known", fix="give another --use_cache"
            )
        write_atomically(owner, json.dumps({"for": KIND, "identity": wanted}, indent=1).encode() + b"\n")
        return
    try:
        found = read_object(owner)
    except ValueError:
        found = {}
    known = found.get("identity")
    if found.get("for") != KIND or not isinstance(known, dict):
        raise RunError(f"{owner} is damaged or is not a file of scoremode", fix="give another --use_cache")
    differing = sorted(name for name in known.keys() | wanted.keys() if known.get(name) != wanted.get(name))
    if differing:
        raise RunError(
            f"{database} holds answers of another model or other settings (it differs in: {', '.join(differing)})",
            fix="give another --use_cache",
        )
