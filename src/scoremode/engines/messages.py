"""Questions and answers between a client and a scoring service: typed values, as scores/packing.py packs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np

from scoremode.errors import InputError
from scoremode.references.format import RAW_DTYPES
from scoremode.scores.answers import Answers, Window
from scoremode.scores.packing import AGAIN, PackedAnswers, PackedWindows, from_message, to_message
from scoremode.scores.schema import Schema
from scoremode.values import Ids, Raw

StatesDtype = Literal["float32", "float16", "bfloat16"]


class TooManyError(InputError):
    """More windows than a request may have."""


class SentBaseline(msgspec.Struct):
    """A baseline: the digest of its head, which was sent before, and its states for the rows of all windows."""

    digest: str
    dtype: StatesDtype
    states: Raw  # (rows, width)


class SentQuestion(msgspec.Struct, tag="score"):
    """Windows to score, as they travel."""

    windows: PackedWindows
    shared: tuple[bool, ...]
    vocabulary: Annotated[int, msgspec.Meta(ge=0)] = 0
    against: SentBaseline | None = None


class SentAnswers(msgspec.Struct, tag="answers"):
    """Which server answered, and its answers to all windows of a request."""

    instance: str
    answers: PackedAnswers


@dataclass(frozen=True, slots=True, eq=False)
class Against:
    """A baseline: the digest of its head, and its hidden states for the rows of each window."""

    digest: str
    dtype: str
    states: tuple[Raw, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Windows to score, all in one request."""

    windows: tuple[Window, ...]
    vocabulary: int = 0  # ids from this one upwards get no probability; 0: all ids count
    shared: tuple[bool, ...] = ()  # does a window begin like others? Empty: none does
    against: Against | None = None

    def to_bytes(self) -> bytes:
        against, shared = None, self.shared or (False,) * len(self.windows)
        if self.against is not None:
            states = np.concatenate(self.against.states).astype(RAW_DTYPES[self.against.dtype], copy=False)
            against = SentBaseline(self.against.digest, self.against.dtype, states)  # type: ignore[arg-type]
        return to_message(SentQuestion(PackedWindows.of(self.windows), shared, self.vocabulary, against))

    @staticmethod
    def from_bytes(data: bytes | memoryview, most: int | None = None) -> Asked:
        """A request that anybody may have written: its arrays fit each other, and nothing more is known of it.

        More than ``most`` windows are refused before any is made: millions of them would take all memory.
        """
        sent = from_message(data, SentQuestion)
        packed, count, against = sent.windows, len(sent.windows), None
        if most is not None and count > most:
            raise TooManyError(f"{count} windows are more than the {most} of a request", fix="send several requests")
        packed.check()
        if len(sent.shared) != count:
            raise InputError("shared does not have one value per window", fix=AGAIN)
        if sent.against is not None:
            states, dtype = sent.against.states, RAW_DTYPES[sent.against.dtype]
            if states.dtype != dtype or states.ndim != 2 or len(states) != len(packed.rows):
                raise InputError("states does not have one line per row, of its dtype", fix=AGAIN)
            split = np.split(states, packed.row_ends[:-1]) if count else []
            against = Against(sent.against.digest, sent.against.dtype, tuple(split))
        windows = tuple(packed.window(index) for index in range(count))
        return Asked(windows, sent.vocabulary, sent.shared, against)


def answer_message(instance: str, answers: Sequence[Answers], schema: Schema) -> bytes:
    """The answers to all windows of a request."""
    return to_message(SentAnswers(instance, PackedAnswers.of(list(enumerate(answers)), schema)))


def read_answers(data: bytes, asked: Asked, schema: Schema) -> tuple[str, list[Answers]]:
    """The instance that answered, and the answers to each window."""
    sent = from_message(data, SentAnswers)
    sent.answers.check(asked.windows, schema, with_kl=asked.against is not None)
    return sent.instance, [answers for _, answers in sent.answers.answers(schema)]


def own_tokens(ids: Ids) -> Window:
    """Every token but the first, each predicted from the row before it."""
    return Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None])
