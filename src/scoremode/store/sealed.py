"""Detect changed manifests by a seal (a hash of all fields), and check each field against a table of kinds.

The seal detects accidents: an edited number, a flipped bit. It is not a signature, because anyone can compute it again;
so every field that is used later is also checked against a table of kinds.

>>> kept = sealed({"targets": 5})
>>> is_sealed(kept), is_sealed({**kept, "targets": 6})
(True, False)
>>> unusable_field({"targets": "5"}, {"targets": whole()})
'targets'
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SEAL = "seal"
LARGEST_NUMBER = sys.float_info.max
DEEPEST = 16  # levels of nesting; scoremode's own manifests stay far below

Kind = Callable[[Any], bool]
"""A function that checks whether a value is of the kind that a field must have."""


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its seal."""
    return {**manifest, SEAL: _digest(manifest)}


def is_sealed(manifest: Mapping[str, Any]) -> bool:
    """Is the manifest unchanged since it was sealed?"""
    return manifest.get(SEAL) == _digest(manifest)


def _digest(manifest: Mapping[str, Any]) -> str:
    bare = {name: value for name, value in manifest.items() if name != SEAL}
    return hashlib.sha256(json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unusable_field(
    manifest: Mapping[str, Any], fields: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None
) -> str | None:
    """The name of the first field that is missing or not of its kind; None if all fields are usable.

    Fields that are in neither table must also be printable JSON, because they are printed with the others.
    """
    kinds = {**fields, **(optional or {})}
    for name in sorted(fields.keys() | manifest.keys()):
        if name not in manifest or not anything(manifest[name]) or not kinds.get(name, anything)(manifest[name]):
            return name
    return None if all(map(_is_text, manifest)) else "field name"


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def whole(least: int = 0, most: int = 1 << 62) -> Kind:
    """A whole number; not true or false."""
    return lambda value: type(value) is int and least <= value <= most


def number(least: float = -LARGEST_NUMBER, most: float = LARGEST_NUMBER) -> Kind:
    """A finite number."""
    return lambda value: type(value) in (int, float) and least <= value <= most


def text(value: Any) -> bool:
    """Text that is not empty and can be printed."""
    return bool(value) and _is_text(value)


def line(value: Any) -> bool:
    """Text that may be empty."""
    return _is_text(value)


def sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def flag(value: Any) -> bool:
    return type(value) is bool


def anything(value: Any, depth: int = 0) -> bool:
    """Anything that can be printed and written as JSON again."""
    if depth > DEEPEST:
        return False
    if isinstance(value, dict):
        return all(_is_text(key) and anything(inner, depth + 1) for key, inner in value.items())
    if isinstance(value, list):
        return all(anything(inner, depth + 1) for inner in value)
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, bool) or value is None:
        return True
    return isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER and not math.isnan(value)


def one_of(*allowed: Any) -> Kind:
    return lambda value: isinstance(value, str) and value in allowed


def both(one: Kind, other: Kind) -> Kind:
    return lambda value: one(value) and other(value)


def either(*kinds: Kind) -> Kind:
    return lambda value: any(kind(value) for kind in kinds)


def optional(kind: Kind) -> Kind:
    """A value of this kind, or null."""
    return lambda value: value is None or kind(value)


def each(kind: Kind) -> Kind:
    """A list of values of this kind."""
    return lambda value: isinstance(value, list) and all(map(kind, value))


def mapping(kind: Kind = anything) -> Kind:
    """An object whose values are all of this kind."""
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


def record(fields: Mapping[str, Kind], more: Mapping[str, Kind] | None = None, *, closed: bool = False) -> Kind:
    """An object with these fields, and perhaps some of ``more``; no other fields if ``closed``."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or unusable_field(value, fields, more) is not None:
            return False
        return not closed or not (value.keys() - fields.keys() - (more or {}).keys())

    return fits


def having(names: Iterable[str], kind: Kind) -> Kind:
    """An object that has at least these fields, and whose values are all of this kind."""
    wanted = frozenset(names)
    return lambda value: mapping(kind)(value) and wanted <= value.keys()


def _is_text(value: Any) -> bool:
    """Is this a string that can be printed? Half a surrogate pair is valid JSON, but cannot be printed."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
