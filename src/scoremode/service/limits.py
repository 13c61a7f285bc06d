"""What one request may ask for. Everything is checked here, because a worker that fails ends the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from scoremode.engines.heads import DIGEST
from scoremode.engines.messages import Asked
from scoremode.errors import InputError
from scoremode.plan.windows import Window
from scoremode.values import Ids

KEY = "scoremode_service"  # in vLLM's ``additional_config``
MIB = 1 << 20


class TooLargeError(InputError):
    """More bytes than a request may have."""


class BusyError(InputError):
    """There is no room at the moment."""


class AbsentError(InputError):
    """What was asked about is not here."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the service states and keeps."""

    body_bytes: int = 256 * MIB  # of one request
    held_bytes: int = 1024 * MIB  # of all requests that are being answered
    windows: int = 1024  # in one request
    targets: int = 1 << 18  # rows × targets per row of one window
    heads_bytes: int = 8192 * MIB  # of all heads that clients sent

    @staticmethod
    def read(config: Any) -> Limits:
        """The limits in a ``VllmConfig``."""
        given: Mapping[str, Any] = (getattr(config, "additional_config", None) or {}).get(KEY) or {}
        return Limits(**{f.name: int(given[f.name]) for f in fields(Limits) if f.name in given})

    def as_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Room:
    """What the model takes."""

    longest: int  # tokens
    inputs: int  # ids that can be fed and scored
    vocabulary: int  # ids that have a probability


def check(asked: Asked, limits: Limits, room: Room) -> None:
    """Refuse what would be wrong, too much, or end a worker."""
    if not asked.windows:
        raise InputError("there is no window in this request", fix="send at least one")
    if len(asked.windows) > limits.windows:
        raise TooLargeError(
            f"{len(asked.windows)} windows are more than the {limits.windows} of a request", fix="send several requests"
        )
    if asked.vocabulary > room.vocabulary:
        raise InputError(
            f"the vocabulary of {asked.vocabulary} is larger than the model's {room.vocabulary}", fix="leave it out"
        )
    for index, window in enumerate(asked.windows):
        _check_window(window, index, limits, room)
    if asked.against is not None and not DIGEST.fullmatch(asked.against.digest):
        raise InputError("against is not a digest", fix="give 64 characters from 0-9 and a-f")


def _check_window(window: Window, index: int, limits: Limits, room: Room) -> None:
    ids, rows, targets = window.ids, window.rows, window.targets
    if not 0 < len(ids) <= room.longest:
        raise InputError(
            f"window {index} has {len(ids)} tokens, and the server takes 1 to {room.longest}",
            fix=f"use windows of at most {room.longest} tokens",
        )
    if targets.size > limits.targets:
        raise TooLargeError(
            f"window {index} has {targets.size} targets, more than {limits.targets}",
            fix="ask for fewer rows or targets",
        )
    if len(rows) and targets.shape[1] == 0:
        raise InputError(f"window {index} has rows without targets", fix="give one target or more per row")
    ascends = bool((rows[1:] > rows[:-1]).all()) and (len(rows) == 0 or (rows[0] >= 0 and rows[-1] < len(ids)))
    if not ascends:
        raise InputError(
            f"the rows of window {index} do not ascend from 0 to at most {len(ids) - 1}", fix="sort them, each once"
        )
    for what, found in (("ids", ids), ("targets", targets)):
        _check_ids(what, found, index, room.inputs)


def _check_ids(what: str, found: Ids, index: int, most: int) -> None:
    if found.size and not (int(found.min()) >= 0 and int(found.max()) < most):
        raise InputError(
            f"the {what} of window {index} are not all from 0 to {most - 1}",
            fix="the tokenizer does not belong to this model",
        )
