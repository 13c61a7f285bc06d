"""Hide secret settings: they are used, but never stored in a manifest, an identity or a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(not kept)"
SECRET_NAME = re.compile(r"(token|key|secret|password|passwd|passphrase|credentials?)$", re.IGNORECASE)


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
    flag, name, rest = "", word, ""
    if word.startswith("--") and "=" in word:
        flag, _, name = word.partition("=")
        flag += "="
        if is_secret(flag[:-1]):
            return flag + HIDDEN
    name, equals, rest = name.partition("=")
    if not equals:
        return word
    if is_secret(name):
        return f"{flag}{name}={HIDDEN}"
    inner = re.sub(r'("[^"]*(?:token|key|secret|password)"\s*:\s*)"[^"]*"', rf'\1"{HIDDEN}"', rest, flags=re.I)
    return f"{flag}{name}={inner}"
