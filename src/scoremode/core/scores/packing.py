"""Typed values that contain arrays, as messages for a network: MessagePack behind a magic number and a version."""

from __future__ import annotations

import struct
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from scoremode.core.scores.schema import Array
from scoremode.errors import InputError, harmless

MAGIC = b"SCOREMOD"
VERSION = 3
CONTENT_TYPE = "application/x-scoremode"
START = struct.Struct("<8sI")  # magic, version
TYPES = frozenset({"<i4", "<i8", "<f8"})  # types of arrays
AGAIN = "see docs/server.md for the form of a message"

T = TypeVar("T")


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
        flat = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1)
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
