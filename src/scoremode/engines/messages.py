"""Questions and answers between a client and a scoring service, as messages: scores/packing.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np

from scoremode.errors import InputError
from scoremode.scores.answers import Answers, Window
from scoremode.scores.packing import AGAIN, Header, Message, PackedAnswers, PackedWindows, Parts, pack
from scoremode.scores.schema import Schema
from scoremode.store.reference_format import RAW_DTYPES
from scoremode.values import Ids, Raw

StatesDtype = Literal["float32", "float16", "bfloat16"]


class TooManyError(InputError):
    """More windows than a request may have."""


class QuestionHeader(Header, kw_only=True, tag="score"):
    """What a request says of its windows."""

    vocabulary: Annotated[int, msgspec.Meta(ge=0)] = 0
    against: str | None = None
    states_dtype: StatesDtype | None = None


class AnswerHeader(Header, kw_only=True, tag="answers"):
    """Which server gave the answers."""

    instance: str


@dataclass(frozen=True, slots=True, eq=False)
class Against:
    """A baseline: the digest of its head, which was sent before, and its hidden states for the rows of each window."""

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

    def to_parts(self) -> Parts:
        header, arrays = QuestionHeader(vocabulary=self.vocabulary), PackedWindows.of(self.windows).arrays()
        arrays["shared"] = np.array(self.shared or [False] * len(self.windows), "<i4")
        if self.against is not None:
            header.against, header.states_dtype = self.against.digest, self.against.dtype  # type: ignore[assignment]
            arrays["states"] = np.concatenate(self.against.states).astype(RAW_DTYPES[self.against.dtype], copy=False)
        return pack(header, arrays)

    @staticmethod
    def from_bytes(data: bytes | memoryview, most: int | None = None) -> Asked:
        """A request that anybody may have written: its arrays fit each other, and nothing more is known of it.

        More than ``most`` windows are refused before any is made: millions of them would take all memory.
        """
        message = Message(data, QuestionHeader)
        count = len(message.counts("tokens"))
        if most is not None and count > most:
            raise TooManyError(f"{count} windows are more than the {most} of a request", fix="send several requests")
        packed, shared = PackedWindows.read(message), message.array("shared", "<i4", 1)
        if len(shared) != count:
            raise InputError("shared does not have one number per window", fix=AGAIN)
        windows = tuple(packed.window(index) for index in range(count))
        against, header = None, message.header
        if header.against is not None:
            if header.states_dtype is None:
                raise InputError("against and states_dtype do not name a head and a dtype", fix=AGAIN)
            rows_of = message.counts("rows_of")
            states = message.flat("states", RAW_DTYPES[header.states_dtype].str, rows_of, dimensions=2)
            split = np.split(states, np.cumsum(rows_of)[:-1]) if count else []
            against = Against(header.against, header.states_dtype, tuple(split))
        return Asked(windows, header.vocabulary, tuple(bool(s) for s in shared), against)


def answer_parts(instance: str, answers: Sequence[Answers], schema: Schema) -> Parts:
    """The answers to all windows of a request."""
    return pack(AnswerHeader(instance=instance), PackedAnswers.of(list(enumerate(answers)), schema).columns)


def read_answers(data: bytes, asked: Asked, schema: Schema) -> tuple[str, list[Answers]]:
    """The instance that answered, and the answers to each window."""
    message = Message(data, AnswerHeader)
    packed = PackedAnswers.read(message, asked.windows, schema, with_kl=asked.against is not None)
    return message.header.instance, [answers for _, answers in packed.answers(schema)]


def own_tokens(ids: Ids) -> Window:
    """Every token but the first, each predicted from the row before it."""
    return Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None])
