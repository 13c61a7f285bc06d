"""Messages between a client and a scoring service: questions and answers, packed by core/scores/packing.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from scoremode.core.scores.answers import Answers, Window
from scoremode.core.scores.packing import AGAIN, PackedAnswers, PackedWindows, from_message, to_message
from scoremode.errors import InputError
from scoremode.values import Ids


class TooLargeError(InputError):
    """A request is larger than the service allows."""


class SentQuestion(msgspec.Struct, tag="score"):
    """A request to score windows, in packed form."""

    windows: PackedWindows
    shared: tuple[bool, ...]
    vocabulary: Annotated[int, msgspec.Meta(ge=0)] = 0


class SentAnswers(msgspec.Struct, tag="answers"):
    """The identity of the server that answered, and its answers to all windows of a request."""

    instance: str
    answers: PackedAnswers


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request to score windows, before it is packed or after it is unpacked."""

    windows: tuple[Window, ...]
    vocabulary: int = 0  # ids from this one upwards get no probability; 0: all ids get one
    shared: tuple[bool, ...] = ()  # for each window: does it start like other windows? Empty: no window does

    def to_bytes(self) -> bytes:
        shared = self.shared or (False,) * len(self.windows)
        return to_message(SentQuestion(PackedWindows.of(self.windows), shared, self.vocabulary))

    @staticmethod
    def from_bytes(data: bytes | memoryview, most: int | None = None) -> Asked:
        """Reads a request from an untrusted client. Checks only that its arrays fit each other.

        More than ``most`` windows are refused before a window is made, because millions of them would take all memory.
        """
        sent = from_message(data, SentQuestion)
        packed, count = sent.windows, len(sent.windows)
        if most is not None and count > most:
            raise TooLargeError(f"{count} windows are more than the {most} of a request", fix="send several requests")
        packed.check()
        if len(sent.shared) != count:
            raise InputError("shared does not have one value per window", fix=AGAIN)
        return Asked(tuple(packed.window(index) for index in range(count)), sent.vocabulary, sent.shared)


def answer_message(instance: str, answers: Sequence[Answers]) -> bytes:
    """Packs the answers to all windows of a request as a message."""
    return to_message(SentAnswers(instance, PackedAnswers.of(list(enumerate(answers)))))


def read_answers(data: bytes, asked: Asked) -> tuple[str, list[Answers]]:
    """Returns the instance of the server that answered, and its answer to each window."""
    sent = from_message(data, SentAnswers)
    sent.answers.check(asked.windows)
    return sent.instance, [answers for _, answers in sent.answers.answers()]


def own_tokens(ids: Ids) -> Window:
    """Returns a window that scores every token except the first, each from the row before it."""
    return Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None])
