"""Manifests: JSON with a seal that shows changes, fields of known types, and no secrets.

The seal is a hash of all fields and detects accidents: an edited number, a flipped bit. It is not a signature, because
anyone can compute it again. Every field that is used later is therefore also checked against a form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from scoremode.core import strict_json
from scoremode.core.disk.files import write_atomically
from scoremode.core.strict_json import is_usable, read_object
from scoremode.errors import RunError, harmless, readable

SEAL = "seal"
MANY_FIELDS = 8  # that nobody else's file has
LAST_LINE = re.compile(rb"scoremode: about ([0-9a-f ]*), seal ([0-9a-f]{64})(?: -->)?\n\Z")  # of sealed texts
HIDDEN = "(not kept)"
SECRET_NAME = re.compile(r"(token|key|secret|password|passwd|passphrase|credentials?)$", re.IGNORECASE)
SECRET_IN_JSON = re.compile(r'("[^"]*(?:token|key|secret|password)"\s*:\s*)"[^"]*"', re.IGNORECASE)

FIELD_AT = re.compile(r"(?:at|in) `\$\.(\w+)")  # find names in msgspec's messages
MISSING_FIELD = re.compile(r"field `(\w+)`")

Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Positive = Annotated[int, Meta(ge=1, le=1 << 62)]
NotNegative = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Sha256 = strict_json.Sha256


def sealed(manifest: Mapping[str, object]) -> dict[str, object]:
    return {**manifest, SEAL: _digest(manifest)}


def is_sealed(manifest: Mapping[str, object]) -> bool:
    """Is the manifest unchanged since it was sealed?"""
    seal = manifest.get(SEAL)
    return seal == _digest(manifest) or seal == _digest(manifest, (", ", ": "))  # results of prob had spaces once


def is_manifest(path: Path, form: type[msgspec.Struct]) -> bool:
    """Is this file a manifest of this form, whatever changed in its values?"""
    try:
        return has_form(read_object(path), form)
    except (OSError, ValueError):
        return False


def has_form(manifest: Any, form: type[msgspec.Struct]) -> bool:
    """Is this an object with an identity and all fields of the form, either many of them or with a valid seal?"""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("identity"), dict):
        return False
    needed = {field.encode_name for field in msgspec.structs.fields(form) if field.required}
    return manifest.keys() >= needed and (len(needed) >= MANY_FIELDS or is_sealed(manifest))


def _digest(manifest: Mapping[str, object], separators: tuple[str, str] = (",", ":")) -> str:
    bare = {name: value for name, value in manifest.items() if name != SEAL}
    return hashlib.sha256(json.dumps(bare, sort_keys=True, separators=separators).encode()).hexdigest()


def digest_of(value: Any) -> str:
    """16 hexadecimal digits of a hash of this value, which may be any JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def sealed_text(text: str, about: Iterable[str], comment: tuple[str, str]) -> str:
    """Returns the text with a comment as its last line: digests of what the text is about, and a seal."""
    bare = f"{text}{comment[0]}scoremode: about {' '.join(sorted(set(about)))}, seal "
    return f"{bare}{hashlib.sha256(bare.encode()).hexdigest()}{comment[1]}\n"


def about_sealed_text(data: bytes) -> frozenset[str] | None:
    """The digests of what a sealed text is about; None if it has no seal, or was changed."""
    match = LAST_LINE.search(data)
    if match is None or hashlib.sha256(data[: match.start(2)]).hexdigest().encode() != match[2]:
        return None
    return frozenset(match[1].decode().split())


def differing_fields(left: Mapping[str, object], right: Mapping[str, object]) -> str:
    """Returns the names of the fields in which two manifests or identities differ, as text; empty if they are equal."""
    return harmless(", ".join(sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))))


def unusable_field(manifest: Mapping[str, object], form: type[msgspec.Struct]) -> str | None:
    """Returns the name of a field that is missing or does not fit ``form``; None if all fields are usable.

    Fields that are not in the form must be printable JSON too, because they are printed with the others.
    """
    for name in sorted(manifest):
        if not is_usable({name: manifest[name]}):
            return name if is_usable(name) else "field name"
    try:
        msgspec.convert(manifest, form)
    except msgspec.ValidationError as wrong:
        match = FIELD_AT.search(str(wrong)) or MISSING_FIELD.search(str(wrong))
        return match[1] if match else "fields"
    return None


def read_sealed(path: Path, form: type[msgspec.Struct], *, format: int, fix: str) -> dict[str, Any]:
    """Returns a manifest of this form; RunError if it cannot be read, has another format, was changed or is damaged."""
    try:
        manifest = read_object(path)
    except ValueError as error:
        raise RunError(f"{path} is damaged ({harmless(str(error))})", fix=fix) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror})", fix=fix) from None
    stored_format = manifest.get("format")
    if type(stored_format) is int and stored_format != format:
        raise RunError(f"{path} was written in format {stored_format}, this scoremode reads {format}", fix=fix)
    if not is_sealed(manifest):
        raise RunError(f"{path} was changed after it was written", fix=fix)
    if wrong := unusable_field(manifest, form):
        raise RunError(f"{path} is damaged (no usable {harmless(wrong)})", fix=fix)
    return manifest


def write_sealed(path: Path, content: Mapping[str, object], form: type[msgspec.Struct]) -> dict[str, Any]:
    """Writes a manifest with its seal, and returns it as it will be read: tuples are lists."""
    whole = sealed(json.loads(readable(json.dumps(content, ensure_ascii=False, allow_nan=False))))
    wrong = unusable_field(whole, form)
    assert wrong is None, f"an invalid manifest: no usable {wrong}"
    write_atomically(path, json.dumps(whole, indent=1).encode())
    return whole


def is_line(value: Any) -> bool:
    """Is this text that can be printed? Half a surrogate pair is valid JSON, but cannot be printed."""
    return isinstance(value, str) and is_usable(value)


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_secret(name: str) -> bool:
    """Does a setting with this name have a value that must not be stored?

    >>> [is_secret(name) for name in ("hf_token", "api-key", "tokenizer", "max_num_batched_tokens", "kv_cache_dtype")]
    [True, True, False, False, False]
    """
    return SECRET_NAME.search(name) is not None


def without_secrets(value: Any) -> Any:
    """Returns the settings with every secret value replaced, at any depth. A pair (name, value) is a setting too.

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
    """Hides the values of secret flags and of secret ``--engine-arg NAME=VALUE`` in the words of a command line.

    >>> command_without_secrets(["--engine-arg", "hf_token=hf_x", "--engine-arg=seed=1", "--token", "hf_y"])
    ['--engine-arg', 'hf_token=(not kept)', '--engine-arg=seed=1', '--token', '(not kept)']
    """
    shown_words, hides_next = [], False
    for word in words:
        shown_words.append(HIDDEN if hides_next else _hidden_word(word))
        hides_next = word.startswith("--") and "=" not in word and is_secret(word)
    return shown_words


def _hidden_word(word: str) -> str:
    """Hides the secret in one word, ``--flag=value``, ``name=value`` or ``--flag=name=value``."""
    flag, equals, rest = word.partition("=") if word.startswith("--") else ("", "", word)
    if equals and is_secret(flag):
        return f"{flag}={HIDDEN}"
    name, has_value, value = rest.partition("=")
    if not has_value:
        return word
    value = HIDDEN if is_secret(name) else SECRET_IN_JSON.sub(rf'\1"{HIDDEN}"', value)
    return f"{flag}{equals}{name}={value}"
