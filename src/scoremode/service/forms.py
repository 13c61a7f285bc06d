"""The JSON form of questions and answers, for people and for small tools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scoremode.engines.messages import Asked, own_tokens
from scoremode.errors import InputError
from scoremode.plan.windows import Answers, Window
from scoremode.service.limits import TooLargeError
from scoremode.strict_json import parse_received
from scoremode.values import Ids

EXAMPLE = 'send {"windows": [{"ids": [1, 2, 3]}]}'
MOST_JSON = 4 << 20  # bytes


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object with numbers and characters that can be used. It is read while others wait, so it must be small."""
    if len(data) > MOST_JSON:
        raise TooLargeError(
            f"{len(data)} bytes of JSON are more than {MOST_JSON}", fix="use the binary form, or several requests"
        )
    try:
        value = parse_received(data)
    except ValueError:
        raise InputError("the body is not JSON", fix=EXAMPLE) from None
    if not isinstance(value, dict):
        raise InputError("the body is not a JSON object", fix=EXAMPLE)
    return value


def take(value: dict[str, Any], known: dict[str, type | tuple[type, ...]], example: str) -> dict[str, Any]:
    """The fields of an object: none unknown, each of its type."""
    for name, found in value.items():
        if name not in known:
            raise InputError(f"there is no field {name[:60]!r}", fix=f"known: {', '.join(known)}")
        if not isinstance(found, known[name]) or (isinstance(found, bool) and known[name] is int):
            raise InputError(f"the field {name} has a value of the wrong kind", fix=example)
    return value


def asked_in_json(data: bytes) -> Asked:
    """``{"windows": [{"ids": […], "rows": […], "targets": [[…]]}], "vocabulary": n}``; only the ids are required."""
    value = take(parse_json(data), {"windows": list, "vocabulary": int}, EXAMPLE)
    windows = tuple(_window(index, given) for index, given in enumerate(value.get("windows", [])))
    if value.get("vocabulary", 1) < 1:
        raise InputError("vocabulary is below 1", fix="leave it out, and all ids count")
    return Asked(windows, value.get("vocabulary", 0))


def _window(index: int, given: Any) -> Window:
    if not isinstance(given, dict):
        raise InputError(f"window {index} is not an object", fix=EXAMPLE)
    take(given, {"ids": list, "rows": list, "targets": list}, EXAMPLE)
    ids = _numbers(given.get("ids", []), f"the ids of window {index}")
    if "rows" not in given and "targets" not in given:
        return own_tokens(ids)
    if "targets" not in given:
        rows = _numbers(given["rows"], f"the rows of window {index}")
        inside = (rows >= 0) & (rows < len(ids) - 1)
        if not inside.all():
            raise InputError(
                f"window {index} has a row without a next token, and no targets", fix="give targets for each row"
            )
        return Window(ids, rows, ids[rows + 1][:, None])
    targets = _targets(given["targets"], index)
    rows = _numbers(given.get("rows", list(range(len(targets)))), f"the rows of window {index}")
    if len(rows) != len(targets):
        raise InputError(f"window {index} has {len(rows)} rows and {len(targets)} lists of targets", fix=EXAMPLE)
    return Window(ids, rows, targets)


def _targets(given: list[Any], index: int) -> Ids:
    if not all(isinstance(line, list) for line in given) or len({len(line) for line in given}) > 1:
        raise InputError(f"the targets of window {index} are not lists of one length", fix=EXAMPLE)
    lines = [_numbers(line, f"the targets of window {index}") for line in given]
    return np.stack(lines) if lines else np.zeros((0, 1), np.int32)


def _numbers(given: list[Any], what: str) -> Ids:
    if not all(type(n) is int and 0 <= n < 1 << 31 for n in given):
        raise InputError(f"{what} are not whole numbers from 0 on", fix=EXAMPLE)
    return np.array(given, np.int32)


def answers_in_json(found: Sequence[Answers]) -> dict[str, Any]:
    """Every column of every window. Probability zero is null, because JSON has no infinity."""
    return {"windows": [{name: _finite(getattr(own, name).tolist()) for name in own.columns} for own in found]}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
