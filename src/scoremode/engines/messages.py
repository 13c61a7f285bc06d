"""The binary form of questions and answers between a client and a scoring service.

    SCOREMOD | version, header's length: two uint32 | header: JSON | arrays, each at a multiple of 8 bytes

Everything is little-endian. The header names each array with its type and shape, so the length of a message follows
from its header, and a message of any other length is refused. Nothing in it is executed, and no array is larger than
the bytes that came.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.engines.lines import Words, width
from scoremode.errors import InputError
from scoremode.plan.windows import Window
from scoremode.store.reference_format import RAW_DTYPES
from scoremode.text.json_files import parse_received
from scoremode.values import Ids, Ints, Raw

MAGIC = b"SCOREMOD"
VERSION = 1
CONTENT_TYPE = "application/x-scoremode"
START = struct.Struct("<8sII")
MOST_HEADER = 1 << 20  # bytes
TYPES: dict[str, np.dtype[Any]] = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8"), **RAW_DTYPES}
NAMES = {dtype: name for name, dtype in reversed(TYPES.items())}
ALIGNED = 8

Parts = list[bytes | memoryview]
"""A message in pieces that are sent one after the other, so that a large array is not copied."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in a message."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """A message's header, read and checked."""

    fields: dict[str, Any]
    places: dict[str, Place]
    size: int  # bytes of the whole message


def pack(kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Raw]) -> Parts:
    """A message, in pieces."""
    described = {name: [NAMES[array.dtype], list(array.shape)] for name, array in arrays.items()}
    header = json.dumps({**fields, "kind": kind, "arrays": described}).encode()
    header += b" " * (-(START.size + len(header)) % ALIGNED)
    parts: Parts = [START.pack(MAGIC, VERSION, len(header)) + header]
    for array in arrays.values():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        parts += [raw, b"\0" * (-len(raw) % ALIGNED)]
    return parts


def size_of(parts: Parts) -> int:
    return sum(len(part) for part in parts)


def read_layout(start: bytes | memoryview, kind: str) -> Layout:
    """The layout of a message from its first bytes, which must have the whole header."""
    if len(start) < START.size or bytes(start[:8]) != MAGIC:
        raise InputError("this is not a message of scoremode", fix="begin it with SCOREMOD, or send JSON")
    _, version, length = START.unpack(start[: START.size])
    if version != VERSION:
        raise InputError(
            f"this message has version {version}, and version {VERSION} is understood here",
            fix="use one version of scoremode on both sides",
        )
    if length > MOST_HEADER or START.size + length > len(start):
        raise InputError(f"the header of a message has {length} bytes and is cut or too long", fix="send it again")
    try:
        header = parse_received(bytes(start[START.size : START.size + length]))
    except ValueError:
        raise InputError("the header of a message is not JSON", fix="send it again") from None
    if not isinstance(header, dict) or header.get("kind") != kind or not isinstance(header.get("arrays"), dict):
        raise InputError(f"this message is not of the kind '{kind}'", fix="send it to the right address")
    places, offset = {}, START.size + length
    for name, described in header["arrays"].items():
        places[name] = _place(name, described, offset)
        offset += places[name].size + (-places[name].size % ALIGNED)
    return Layout(header, places, offset)


def _place(name: str, described: Any, offset: int) -> Place:
    try:
        dtype, shape = described
        good = dtype in TYPES and isinstance(shape, list) and len(shape) <= 2
        good = good and all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise InputError(f"the array {name[:40]} of a message is described wrongly", fix="send it again")
    known: np.dtype[Any] = TYPES[dtype]
    return Place(known, tuple(shape), offset)


def parse(data: bytes | memoryview, kind: str) -> tuple[dict[str, Any], dict[str, Raw]]:
    """The fields and arrays of a whole message. The arrays are views, and cannot be written to."""
    layout = read_layout(data, kind)
    if layout.size != len(data):
        raise InputError(f"a message of {layout.size} bytes came with {len(data)}", fix="send it again")
    view = memoryview(data).toreadonly()
    arrays = {
        name: np.frombuffer(view[p.offset : p.offset + p.size], p.dtype).reshape(p.shape)
        for name, p in layout.places.items()
    }
    return layout.fields, arrays


class TooManyError(InputError):
    """More windows than a request may have."""


# ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        def joined(arrays: list[Any], dtype: str) -> Raw:
            return np.concatenate([np.asarray(a, dtype).reshape(-1) for a in arrays] or [np.empty(0, dtype)])

        windows = self.windows
        fields: dict[str, Any] = {"vocabulary": self.vocabulary}
        arrays: dict[str, Raw] = {
            "tokens": np.array([len(w.ids) for w in windows], "<i8"),
            "rows_of": np.array([len(w.rows) for w in windows], "<i8"),
            "targets_of": np.array([w.targets.shape[1] for w in windows], "<i8"),
            "shared": np.array(self.shared or [False] * len(windows), "<i4"),
            "ids": joined([w.ids for w in windows], "<i4"),
            "rows": joined([w.rows for w in windows], "<i4"),
            "targets": joined([w.targets for w in windows], "<i4"),
        }
        if self.against is not None:
            fields |= {"against": self.against.digest, "states_dtype": self.against.dtype}
            arrays["states"] = np.concatenate(self.against.states).astype(RAW_DTYPES[self.against.dtype], copy=False)
        return pack("score", fields, arrays)

    @staticmethod
    def from_bytes(data: bytes | memoryview, most: int | None = None) -> Asked:
        """A request that anybody may have written: its arrays fit each other, and nothing more is known of it.

        More than ``most`` windows are refused before any is made: millions of them would take all memory.
        """
        fields, arrays = parse(data, "score")
        tokens, rows_of, targets_of = (_counts(arrays, name) for name in ("tokens", "rows_of", "targets_of"))
        shared = _array(arrays, "shared", "int32", 1)
        if not len(tokens) == len(rows_of) == len(targets_of) == len(shared):
            raise InputError("tokens, rows_of, targets_of and shared do not have one number per window", fix=_AGAIN)
        if most is not None and len(tokens) > most:
            raise TooManyError(
                f"{len(tokens)} windows are more than the {most} of a request", fix="send several requests"
            )
        ids = _split(_array(arrays, "ids", "int32", 1), tokens, "ids")
        rows = _split(_array(arrays, "rows", "int32", 1), rows_of, "rows")
        targets = _split(_array(arrays, "targets", "int32", 1), rows_of * targets_of, "targets")
        windows = tuple(
            Window(i, r, t.reshape(len(r), k))
            for i, r, t, k in zip(ids, rows, targets, targets_of.tolist(), strict=True)
        )
        vocabulary = fields.get("vocabulary", 0)
        if type(vocabulary) is not int or vocabulary < 0:
            raise InputError("the vocabulary of a request is not a whole number from 0 on", fix=_AGAIN)
        return Asked(windows, vocabulary, tuple(bool(s) for s in shared), _against(fields, arrays, rows_of))


_AGAIN = "see docs/service.md for the form of a request"


def _against(fields: dict[str, Any], arrays: dict[str, Raw], rows_of: Ints) -> Against | None:
    digest, dtype = fields.get("against"), fields.get("states_dtype")
    if digest is None:
        return None
    if not isinstance(digest, str) or not isinstance(dtype, str) or dtype not in RAW_DTYPES:
        raise InputError("against and states_dtype do not name a head and a dtype", fix=_AGAIN)
    states = _array(arrays, "states", dtype, 2)
    return Against(digest, dtype, tuple(_split(states, rows_of, "states")))


def _array(arrays: dict[str, Raw], name: str, dtype: str, dimensions: int) -> Raw:
    found = arrays.get(name)
    if found is None or found.dtype != TYPES[dtype] or found.ndim != dimensions:
        raise InputError(f"the array {name} of {dtype} in {dimensions} dimensions is missing", fix=_AGAIN)
    return found


def _counts(arrays: dict[str, Raw], name: str) -> Ints:
    found = _array(arrays, name, "int64", 1)
    if len(found) and not (int(found.min()) >= 0 and int(found.max()) < 1 << 31):
        raise InputError(f"{name} has a number that is not from 0 to 2147483647", fix=_AGAIN)
    return found


def _split(array: Raw, counts: Ints, name: str) -> list[Any]:
    ends = np.cumsum(counts)
    total = sum(counts.tolist())  # in Python: it may be larger than any array
    if total != len(array):
        raise InputError(f"{name} has {len(array)} entries for {total}", fix=_AGAIN)
    return np.split(array, ends[:-1]) if len(counts) else []


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def answer_parts(instance: str, lines: Sequence[Words]) -> Parts:
    """The lines of all windows of a request."""
    words = np.concatenate([own.reshape(-1) for own in lines] or [np.empty(0, np.int32)])
    return pack("answers", {"instance": instance}, {"words": words.astype("<i4", copy=False)})


def read_answers(data: bytes, windows: Sequence[Window], extra: int) -> tuple[str, list[Words]]:
    """The instance that answered, and the lines of each window: each with ``extra`` words after its columns."""
    fields, arrays = parse(data, "answers")
    per_line = [width(w.targets.shape[1]) + extra for w in windows]
    sizes = np.array([len(w.rows) * n for w, n in zip(windows, per_line, strict=True)], np.int64)
    found = _split(_array(arrays, "words", "int32", 1), sizes, "words")
    instance = fields.get("instance")
    if not isinstance(instance, str):
        raise InputError("an answer does not say which server it is from", fix="send the request again")
    return instance, [own.reshape(-1, n) for own, n in zip(found, per_line, strict=True)]


def own_tokens(ids: Ids) -> Window:
    """Every token but the first, each predicted from the row before it."""
    return Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None])
