"""Messages between a client and a scoring service: windows and answers in MessagePack, behind a magic number."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import numpy as np

from scoremode.core.scores.answers import REQUESTED, Answers, Window, check_shapes
from scoremode.core.scores.schema import Array
from scoremode.errors import InputError, harmless

MAGIC = b"SCOREMOD"
VERSION = 3
CONTENT_TYPE = "application/x-scoremode"
START = struct.Struct("<8sI")  # magic, version
TYPES = frozenset({"<i4", "<i8", "<f8"})  # types of arrays
AGAIN = "see docs/server.md for the form of a message"
LONGEST_LIST = 1 << 16  # windows of a message: each takes memory before a service counts them
WINDOW_BYTES = 1 << 10  # of the names and shapes of one window's answers, at most

T = TypeVar("T")


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


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def to_message(value: Any) -> bytes:
    """Encodes a value as a message: magic and version, then MessagePack. An array is [type, shape, its bytes]."""
    return START.pack(MAGIC, VERSION) + msgspec.msgpack.encode(value, enc_hook=_array_out)


def from_message(data: bytes | memoryview, kind: type[T]) -> T:
    """Decodes a message that anybody may have written. Nothing in it is executed; its arrays are read-only."""
    if len(data) < START.size or bytes(data[:8]) != MAGIC:
        raise InputError("this is not a message of scoremode", fix="begin it with SCOREMOD, or send JSON")
    _, version = START.unpack(data[: START.size])
    if version != VERSION:
        raise InputError(
            f"this message has version {version}, and version {VERSION} is understood here",
            fix="use one version of scoremode on both sides",
        )
    try:
        return msgspec.msgpack.decode(memoryview(data)[START.size :], type=kind, dec_hook=_array_in)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise InputError(f"this message is wrong: {harmless(str(wrong))[:200]}", fix=AGAIN) from None


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).ravel()
        return flat.dtype.str, value.shape, flat.view(np.uint8).data
    raise TypeError(f"a {type(value).__name__} does not travel")


def _array_in(kind: Any, value: Any) -> Array:
    """Decodes an array and checks that it has its field's type; msgspec adds the field's name to a ValueError."""
    dtype, shape, data = value
    if not (isinstance(dtype, str) and dtype in TYPES and isinstance(data, bytes)):
        raise ValueError("not an array")
    if not (len(shape) <= 2 and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError("an array of an impossible shape")
    (wanted,) = get_args(get_args(kind)[1])
    if wanted is not Any and np.dtype(wanted) != np.dtype(dtype):
        raise ValueError(f"an array of {dtype} instead of {np.dtype(wanted).str}")
    array: Array = np.frombuffer(data, dtype).reshape(shape)
    return array
