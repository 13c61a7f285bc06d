"""JSON that anybody may have written: every way to be wrong is a ValueError with a short reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 64 << 20  # bytes of a manifest, a config or a tokenizer file that is still read


def parse(data: bytes | str) -> Any:
    """The value, with strict JSON: no NaN, no infinity, no nesting deeper than Python can follow.

    >>> parse(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parse("[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: nested too deeply
    """
    try:
        return json.loads(data, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; ValueError if it is anything else, OSError if it cannot be read."""
    if not path.is_file():
        raise ValueError("not a file")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"larger than {LARGEST >> 20} MiB")
    value = parse(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
