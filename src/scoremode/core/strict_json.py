"""Reads untrusted JSON, and judges names in it. Every defect raises a ValueError with a short reason."""

from __future__ import annotations

import codecs
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, NoReturn

from msgspec import Meta

from scoremode.core.reading import LARGEST, read_file

DEEPEST = 100  # levels; Python's recursion limit is near 1,000

Commit = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})\Z")]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # bytes


def parse(data: bytes | str, *, constants: bool = False) -> Any:
    """Parses strict JSON: no NaN, no infinity, at most 100 levels of nesting.

    ``constants`` allows NaN and Infinity, which Python's own ``json.dump`` writes into configs and rows.

    >>> parse(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parse("[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: nested too deeply
    """
    try:
        text = data if isinstance(data, str) else data.removeprefix(codecs.BOM_UTF8).decode()  # json accepts UTF-16 too
        value = (_WITH_CONSTANTS if constants else _STRICT).decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if text.count("[") + text.count("{") > DEEPEST and _deeper_than(DEEPEST, value):
        raise ValueError("nested too deeply")
    return value


def parse_received(data: bytes) -> Any:
    """Parses a message of another program: strict JSON, numbers that are finite and fit in 64 bits, valid Unicode.

    >>> parse_received(b'[1e400]')
    Traceback (most recent call last):
    ...
    ValueError: a number or a character in it cannot be used
    """
    value = parse(data)
    if _SUSPICIOUS.search(data) and not is_usable(value):
        raise ValueError("a number or a character in it cannot be used")
    return value


def is_usable(value: Any) -> bool:
    """Is every number in this JSON finite and of 64 bits, and every text valid Unicode?"""
    if isinstance(value, dict):
        return all(map(is_usable, value)) and all(map(is_usable, value.values()))
    if isinstance(value, list):
        return all(map(is_usable, value))
    if isinstance(value, str):
        return not _HALF_PAIR.search(value)
    return math.isfinite(value) if isinstance(value, float) else value is None or -(1 << 63) <= value < 1 << 64


def _deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, item) for item in inside)


def read_object(path: Path, *, constants: bool = False, most: int = LARGEST) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises ValueError if it is not an object, OSError if it cannot be read."""
    if not path.is_file():
        raise ValueError("not a file")
    value = parse(read_file(path, most), constants=constants)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def require_inside(name: str) -> None:
    """Raises ValueError if a name from outside, appended to a folder, could lead out of it on any system.

    >>> require_inside("Q4_K_M/model.gguf")
    """
    parts = name.split("/")
    longest = max(len(part.encode("utf-8", "replace")) for part in parts)
    if _UNUSABLE.search(name) or not {"", ".", ".."}.isdisjoint(parts) or longest > 255 or len(name) > 1000:
        raise ValueError(f"{name[:80]!r} is not a name in a folder")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# only these can be unusable: many digits before a point, a long exponent, half a surrogate pair. Others are not checked
_SUSPICIOUS = re.compile(rb"(?<![.\d])\d{19}|[eE][+-]?\d{3}|\\u[dD][89a-fA-F]")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
# drives and separators of Windows; characters that control a terminal or the direction of writing
_UNUSABLE = re.compile(r"^[A-Za-z]:|[\\\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_STRICT, _WITH_CONSTANTS = json.JSONDecoder(parse_constant=_no_number), json.JSONDecoder()
