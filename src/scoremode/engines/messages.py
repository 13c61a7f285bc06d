"""Messages between a client and a scoring service: questions, answers, and heads of baselines.

Questions and answers are typed values, packed by scores/packing.py. The head of a baseline is sent once, and the
service stores it in a file that is named by the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from scoremode.engines.base import StoredHead
from scoremode.errors import InputError
from scoremode.references.format import RAW_DTYPES
from scoremode.scores.answers import Answers, Window
from scoremode.scores.packing import (
    AGAIN,
    MAGIC,
    START,
    VERSION,
    PackedAnswers,
    PackedWindows,
    from_message,
    require_version,
    to_message,
)
from scoremode.values import Ids, Raw

FOLDER = "SCOREMODE_SERVICE_FOLDER"  # where a service stores data of clients, and its workers read it
DIGEST = re.compile(r"[0-9a-f]{64}")
LENGTH = struct.Struct("<I")
MOST_HEADER = 1 << 12  # bytes

StatesDtype = Literal["float32", "float16", "bfloat16"]


class TooManyError(InputError):
    """A request has more windows than the limit."""


class PackedStates(msgspec.Struct):
    """A baseline in a message: the digest of its head, which was sent before, and its states for all windows' rows."""

    digest: str
    dtype: StatesDtype
    states: Raw  # (rows, width)


class SentQuestion(msgspec.Struct, tag="score"):
    """A request to score windows, in packed form."""

    windows: PackedWindows
    shared: tuple[bool, ...]
    vocabulary: Annotated[int, msgspec.Meta(ge=0)] = 0
    against: PackedStates | None = None


class SentAnswers(msgspec.Struct, tag="answers"):
    """The identity of the server that answered, and its answers to all windows of a request."""

    instance: str
    answers: PackedAnswers


@dataclass(frozen=True, slots=True, eq=False)
class BaselineStates:
    """A baseline: the digest of its head, and its hidden states for the rows of each window."""

    digest: str
    dtype: str
    states: tuple[Raw, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request to score windows, before it is packed or after it is unpacked."""

    windows: tuple[Window, ...]
    vocabulary: int = 0  # ids from this one upwards get no probability; 0: all ids get one
    shared: tuple[bool, ...] = ()  # for each window: does it start like other windows? Empty: no window does
    against: BaselineStates | None = None

    def to_bytes(self) -> bytes:
        against, shared = None, self.shared or (False,) * len(self.windows)
        if self.against is not None:
            states = np.concatenate(self.against.states).astype(RAW_DTYPES[self.against.dtype], copy=False)
            against = PackedStates(self.against.digest, self.against.dtype, states)  # type: ignore[arg-type]
        return to_message(SentQuestion(PackedWindows.of(self.windows), shared, self.vocabulary, against))

    @staticmethod
    def from_bytes(data: bytes | memoryview, most: int | None = None) -> Asked:
        """Reads a request from an untrusted client. Checks only that its arrays fit each other.

        More than ``most`` windows are refused before a window is made, because millions of them would take all memory.
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
            against = BaselineStates(sent.against.digest, sent.against.dtype, tuple(split))
        windows = tuple(packed.window(index) for index in range(count))
        return Asked(windows, sent.vocabulary, sent.shared, against)


def answer_message(instance: str, answers: Sequence[Answers]) -> bytes:
    """Packs the answers to all windows of a request as a message."""
    return to_message(SentAnswers(instance, PackedAnswers.of(list(enumerate(answers)))))


def read_answers(data: bytes, asked: Asked) -> tuple[str, list[Answers]]:
    """Returns the instance of the server that answered, and its answer to each window."""
    sent = from_message(data, SentAnswers)
    sent.answers.check(asked.windows, with_kl=asked.against is not None)
    return sent.instance, [answers for _, answers in sent.answers.answers()]


def own_tokens(ids: Ids) -> Window:
    """Returns a window that scores every token except the first, each from the row before it."""
    return Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None])


# ── heads of baselines ───────────────────────────────────────────────────────────────────────────────────────────────
Parts = list[bytes | memoryview]
"""Bytes that are sent one after the other, so that a large array is not copied."""


class HeadHeader(msgspec.Struct, tag="head"):
    """The shape and types of a head. The bytes of its matrix and its bias follow in the message."""

    vocabulary: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    width: Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]
    dtype: StatesDtype
    bias_dtype: StatesDtype | None  # None: the head has no bias
    scale: float
    softcap: float | None = None

    @property
    def matrix_bytes(self) -> int:
        return self.vocabulary * self.width * RAW_DTYPES[self.dtype].itemsize

    @property
    def bias_bytes(self) -> int:
        return 0 if self.bias_dtype is None else self.vocabulary * RAW_DTYPES[self.bias_dtype].itemsize


def head_parts(head: StoredHead) -> Parts:
    """Returns a head as pieces of bytes: start of a message, length of the JSON header, the header, then the arrays."""
    header = HeadHeader(
        vocabulary=head.vocabulary,
        width=head.weight.shape[1],
        dtype=head.dtype,  # type: ignore[arg-type]
        bias_dtype=None if head.bias is None else head.bias_dtype,  # type: ignore[arg-type]
        scale=head.scale,
        softcap=head.softcap,
    )
    text = msgspec.json.encode(header)
    arrays = [own[: head.vocabulary] for own in (head.weight, head.bias) if own is not None]
    raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    return [START.pack(MAGIC, VERSION) + LENGTH.pack(len(text)) + text, *raw]


def digest_of(parts: Parts) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def heads_folder() -> Path:
    """Returns the folder in which this service stores heads. Its front end and its workers use the same folder."""
    found = os.environ.get(FOLDER)
    if not found:
        raise OSError(f"{FOLDER} is not set")
    return Path(found)


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A file with a received head. Its header has been checked; its rows are read when they are needed."""

    path: Path
    header: HeadHeader
    offset: int  # where the matrix starts, in bytes

    @staticmethod
    def open(path: Path) -> HeadFile:
        """Opens and checks the file of a head. Raises InputError if the file is anything else."""
        with path.open("rb") as file:
            start = file.read(START.size + LENGTH.size)
            require_version(start)
            length = int.from_bytes(start[START.size :], "little")
            text = file.read(min(length, MOST_HEADER))
        try:
            header = msgspec.json.decode(text, type=HeadHeader)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
            raise InputError(f"the head of a baseline is described wrongly ({wrong})", fix="send it again") from None
        if not math.isfinite(header.scale) or not math.isfinite(header.softcap or 0.0):
            raise InputError("the scale or cap of a head is no number", fix="send it again")
        offset = START.size + LENGTH.size + length
        size = offset + header.matrix_bytes + header.bias_bytes
        if path.stat().st_size != size:
            raise InputError(f"a head should have {size} bytes, and {path.stat().st_size} arrived", fix="send it again")
        return HeadFile(path, header, offset)

    def rows(self, first: int, count: int) -> StoredHead:
        """Returns the head for ``count`` ids from ``first`` on: their rows of the matrix, and their bias if any."""
        header, bias = self.header, None
        if first < 0 or first + count > header.vocabulary:
            raise ValueError(f"ids {first} to {first + count} of a head of {header.vocabulary}")
        weight = self._read(self.offset, header.dtype, first * header.width, count * header.width)
        if header.bias_dtype is not None:
            bias = self._read(self.offset + header.matrix_bytes, header.bias_dtype, first, count)
        return StoredHead(
            weight=weight.reshape(-1, header.width),
            bias=bias,
            dtype=header.dtype,
            bias_dtype=header.bias_dtype or header.dtype,
            vocabulary=header.vocabulary,
            scale=header.scale,
            softcap=header.softcap,
        )

    def _read(self, begin: int, dtype: str, first: int, count: int) -> Raw:
        raw = RAW_DTYPES[dtype]
        found: Raw = np.fromfile(self.path, raw, count, offset=begin + first * raw.itemsize)
        if len(found) != count:
            raise ValueError("a head was cut")
        return found
