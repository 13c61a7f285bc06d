"""Messages between a client and a scoring service: questions and answers, in MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from scoremode.core.scores.answers import REQUESTED, Answers, Window, check_shapes
from scoremode.core.scores.packing import AGAIN, from_message, to_message
from scoremode.errors import InputError
from scoremode.values import Ids

LONGEST_LIST = 1 << 16  # windows of a message: each takes memory before a service counts them
WINDOW_BYTES = 1 << 10  # of the names and shapes of one window's answers, at most


class TooLargeError(InputError):
    """A request is larger than the service allows."""


class Asked(msgspec.Struct, tag="score", frozen=True, eq=False):
    """A request to score windows."""

    windows: Annotated[tuple[Window, ...], msgspec.Meta(max_length=LONGEST_LIST)]
    vocabulary: Annotated[int, msgspec.Meta(ge=0)] = 0  # ids from this one upwards get no probability; 0: all get one
    shared: tuple[bool, ...] = ()  # for each window: does it start like other windows? Empty: no window does

    def to_bytes(self) -> bytes:
        return to_message(self)

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Asked:
        """Reads a request from an untrusted client. Checks only that its arrays fit each other."""
        asked = from_message(data, Asked)
        if asked.shared and len(asked.shared) != len(asked.windows):
            raise InputError("shared does not have one value per window", fix=AGAIN)
        for window in asked.windows:
            if (window.ids.ndim, window.rows.ndim, window.targets.ndim) != (1, 1, 2):
                raise InputError("the arrays of a window have other axes", fix=AGAIN)
            if len(window.targets) != len(window.rows):
                raise InputError("targets has not one line for each row", fix=AGAIN)
        return asked


class SentAnswers(msgspec.Struct, tag="answers"):
    """The identity of the server that answered, and its answers to all windows of a request."""

    instance: str
    answers: tuple[Answers, ...]


def answer_message(instance: str, answers: Sequence[Answers]) -> bytes:
    """Packs the answers to all windows of a request as a message."""
    return to_message(SentAnswers(instance, tuple(answers)))


def read_answers(data: bytes, asked: Asked) -> tuple[str, tuple[Answers, ...]]:
    """Returns the instance of the server that answered, and its answer to each window."""
    sent = from_message(data, SentAnswers)
    if len(sent.answers) != len(asked.windows):
        raise InputError("it is about other windows", fix="send it again")
    for index, (window, own) in enumerate(zip(asked.windows, sent.answers, strict=True)):
        check_shapes(window.targets.shape, index, own)
        if own.divergences or any(getattr(own, name) is not None for name in REQUESTED):
            raise InputError("it has columns that nobody asked for", fix="send it again")
    return sent.instance, sent.answers


def most_bytes(windows: Sequence[Window]) -> int:
    """Returns the largest size in bytes that a correct answer to these windows may have."""
    return sum(WINDOW_BYTES + 16 * window.targets.size + 24 * len(window.rows) for window in windows)


def own_tokens(ids: Ids) -> Window:
    """Returns a window that scores every token except the first, each from the row before it."""
    return Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None])
