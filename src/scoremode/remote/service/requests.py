"""Checks a request against all limits, and reads its form in JSON, which is for people and for small tools.

Every request is checked here, because a worker that fails ends the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from scoremode.core.scores.answers import Answers, Window, own_tokens
from scoremode.core.scores.messages import Asked, TooLargeError
from scoremode.core.strict_json import parse_received
from scoremode.errors import InputError

MOST_BYTES, MOST_JSON = 256 << 20, 4 << 20  # of the body of one request
MOST_WINDOWS = 1024  # in one request
MOST_TARGETS = 1 << 18  # rows × targets per row of one window
SCORE_EXAMPLE = 'send {"windows": [{"ids": [1, 2, 3]}]}'
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    longest: int  # tokens
    inputs: int  # ids that can be fed and scored
    vocabulary: int  # ids that have a probability


def check(request: Asked, room: ModelLimits) -> None:
    """Refuses a request that is wrong, too large, or would end a worker."""
    if not request.windows:
        raise InputError("there is no window in this request", fix="send at least one")
    if len(request.windows) > MOST_WINDOWS:
        raise TooLargeError(
            f"{len(request.windows)} windows are more than the {MOST_WINDOWS} of a request", fix="send several requests"
        )
    if request.vocabulary > room.vocabulary:
        raise InputError(
            f"the vocabulary of {request.vocabulary} is larger than the model's {room.vocabulary}", fix="leave it out"
        )
    for index, window in enumerate(request.windows):
        _check_window(window, index, room)


def _check_window(window: Window, index: int, room: ModelLimits) -> None:
    ids, rows, targets = window.ids, window.rows, window.targets
    if not 0 < len(ids) <= room.longest:
        raise InputError(
            f"window {index} has {len(ids)} tokens, and the server takes 1 to {room.longest}",
            fix=f"use windows of at most {room.longest} tokens",
        )
    if targets.size > MOST_TARGETS:
        raise TooLargeError(
            f"window {index} has {targets.size} targets, more than {MOST_TARGETS}",
            fix="ask for fewer rows or targets",
        )
    if len(rows) and targets.shape[1] == 0:
        raise InputError(f"window {index} has rows without targets", fix="give one target or more per row")
    ascends = bool((rows[1:] > rows[:-1]).all()) and (len(rows) == 0 or (rows[0] >= 0 and rows[-1] < len(ids)))
    if not ascends:
        raise InputError(
            f"the rows of window {index} do not ascend from 0 to at most {len(ids) - 1}", fix="sort them, each once"
        )
    for name, array in (("ids", ids), ("targets", targets)):
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < room.inputs):
            raise InputError(
                f"the {name} of window {index} are not all from 0 to {room.inputs - 1}",
                fix="the tokenizer does not belong to this model",
            )


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def body_of(request: Any, most: int) -> bytes:
    """Reads the whole body of a request; refuses one of more than ``most`` bytes before it is read to its end."""
    content_length = request.headers.get("content-length", "0")
    body = bytearray()
    if content_length.isdecimal() and int(content_length[:16]) <= most:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                break
        else:
            return bytes(body)
    raise TooLargeError(f"a request has more than {most} bytes", fix="send several requests")


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class WindowForm(msgspec.Struct, forbid_unknown_fields=True):
    """A window in JSON. Without rows and targets, every token but the first is scored."""

    ids: list[Id] = []
    rows: list[Id] | None = None
    targets: list[list[Id]] | None = None


class ScoreForm(msgspec.Struct, forbid_unknown_fields=True):
    windows: list[WindowForm] = []
    vocabulary: Annotated[int, msgspec.Meta(ge=1)] = 0  # 0: all ids count


def read_form(data: bytes, form: type[F], example: str) -> F:
    """Reads a body in JSON, of a known form. The body must be small, because other requests wait meanwhile."""
    if len(data) > MOST_JSON:
        raise TooLargeError(
            f"{len(data)} bytes of JSON are more than {MOST_JSON}", fix="use the binary form, or several requests"
        )
    try:
        return msgspec.convert(parse_received(data), form)
    except msgspec.ValidationError as error:
        raise InputError(f"this request has a wrong form ({str(error)[:200]})", fix=example) from None
    except ValueError:
        raise InputError("the body is not JSON", fix=example) from None


def asked_in_json(data: bytes) -> Asked:
    """Reads ``{"windows": [{"ids": […], "rows": […], "targets": [[…]]}], "vocabulary": n}``; only ids are required."""
    form = read_form(data, ScoreForm, SCORE_EXAMPLE)
    return Asked(tuple(_window(index, window) for index, window in enumerate(form.windows)), form.vocabulary)


def _window(index: int, form: WindowForm) -> Window:
    ids = np.array(form.ids, np.int32)
    if form.rows is None and form.targets is None:
        return own_tokens(ids)
    rows, targets = form.rows or [], form.targets or []
    if len(rows) != len(targets) or len({len(line) for line in targets}) > 1:
        raise InputError(f"window {index} has not a list of targets for each row, all as long", fix=SCORE_EXAMPLE)
    return Window(ids, np.array(rows, np.int32), np.array(targets or np.zeros((0, 1)), np.int32))


def answers_in_json(answers: Sequence[Answers]) -> bytes:
    """Returns every column of every window. The logarithm of probability zero is null, because JSON has no infinity."""
    return msgspec.json.encode(
        {"windows": [{name: column.tolist() for name, column in answer.arrays()} for answer in answers]}
    )
