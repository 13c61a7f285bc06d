"""Manifests: JSON with a seal that shows changes, fields that are checked by kind, and no secrets.

The seal is a hash of all fields and detects accidents: an edited number, a flipped bit. It is not a signature, because
anyone can compute it again; so every field that is used later is also checked against a table of kinds.

>>> kept = sealed({"targets": 5})
>>> is_sealed(kept), is_sealed({**kept, "targets": 6})
(True, False)
>>> unusable_field({"targets": "5"}, {"targets": whole()})
'targets'
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scoremode.errors import harmless

SEAL = "seal"
LARGEST_NUMBER = sys.float_info.max
DEEPEST = 16  # levels of nesting; scoremode's own manifests stay far below
HIDDEN = "(not kept)"
SECRET_NAME = re.compile(r"(token|key|secret|password|passwd|passphrase|credentials?)$", re.IGNORECASE)
SECRET_IN_JSON = re.compile(r'("[^"]*(?:token|key|secret|password)"\s*:\s*)"[^"]*"', re.IGNORECASE)

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


def differing_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The names of the fields in which two manifests or identities differ, for a message; empty if they are equal."""
    return harmless(", ".join(sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))))


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
    return None if all(map(line, manifest)) else "field name"


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def whole(least: int = 0, most: int = 1 << 62) -> Kind:
    """A whole number; not true or false."""
    return lambda value: type(value) is int and least <= value <= most


def number(least: float = -LARGEST_NUMBER, most: float = LARGEST_NUMBER) -> Kind:
    """A finite number."""
    return lambda value: type(value) in (int, float) and least <= value <= most


def line(value: Any) -> bool:
    """Text that can be printed and may be empty. Half a surrogate pair is valid JSON, but cannot be printed."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def text(value: Any) -> bool:
    """Text that can be printed and is not empty."""
    return bool(value) and line(value)


def sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def flag(value: Any) -> bool:
    return type(value) is bool


def anything(value: Any, depth: int = 0) -> bool:
    """Anything that can be printed and written as JSON again."""
    if depth > DEEPEST:
        return False
    if isinstance(value, dict):
        return all(line(key) and anything(inner, depth + 1) for key, inner in value.items())
    if isinstance(value, list):
        return all(anything(inner, depth + 1) for inner in value)
    if isinstance(value, int | float):  # true and false are ints
        return abs(value) <= LARGEST_NUMBER
    return value is None or line(value)


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


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_secret(name: str) -> bool:
    """Does a setting with this name have a value that must not be stored?

    >>> [is_secret(name) for name in ("hf_token", "api-key", "tokenizer", "max_num_batched_tokens", "kv_cache_dtype")]
    [True, True, False, False, False]
    """
    return SECRET_NAME.search(name) is not None


def without_secrets(value: Any) -> Any:
    """The same settings with every secret value replaced, at any depth; pairs (name, value) count as settings too.

    >>> without_secrets({"engine_args": (("hf_token", "hf_x"), ("seed", 1))})
    {'engine_args': [['hf_token', '(not kept)'], ['seed', 1]]}
    """
    if isinstance(value, Mapping):
        return {name: HIDDEN if is_secret(str(name)) else without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and is_secret(value[0]):
            return [value[0], HIDDEN]
        return [without_secrets(inner) for inner in value]
    return value


def command_without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line, with the values of secret flags and of secret ``--engine-arg NAME=VALUE`` hidden.

    >>> command_without_secrets(["--engine-arg", "hf_token=hf_x", "--engine-arg=seed=1", "--token", "hf_y"])
    ['--engine-arg', 'hf_token=(not kept)', '--engine-arg=seed=1', '--token', '(not kept)']
    """
    found, hides_next = [], False
    for word in words:
        found.append(HIDDEN if hides_next else _hidden_word(word))
        hides_next = word.startswith("--") and "=" not in word and is_secret(word)
    return found


def _hidden_word(word: str) -> str:
    """One word, ``--flag=value``, ``name=value`` or ``--flag=name=value``, with its secret hidden."""
    flag, equals, rest = word.partition("=") if word.startswith("--") else ("", "", word)
    if equals and is_secret(flag):
        return f"{flag}={HIDDEN}"
    name, has_value, value = rest.partition("=")
    if not has_value:
        return word
    value = HIDDEN if is_secret(name) else SECRET_IN_JSON.sub(rf'\1"{HIDDEN}"', value)
    return f"{flag}{equals}{name}={value}"
