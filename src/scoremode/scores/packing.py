"""The one way in which windows and answers travel between processes and machines: as a few flat arrays.

``PackedWindows``   many windows: to replicas inside a Parcel, to a service inside a message
``PackedAnswers``   answers to many windows, column by column: back from replicas and services
``pack`` ─▶ bytes   a message of arrays with a typed header, for what crosses a network
``lines``           answers as rows of int32 words, which is all that vLLM's workers can give back
``flat_columns``    the columns of one window, as a journal's record has them

The columns, their types and their order follow from the schema everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from scoremode.errors import InputError
from scoremode.scores.answers import REQUESTED, Answers, Window
from scoremode.scores.schema import BUILT_IN, KL, Array, Column, Schema
from scoremode.values import Floats, Ids, Ints, Raw

INT32 = np.dtype("<i4")


def _ends(lengths: Sequence[int] | Ints) -> Ints:
    return np.cumsum(np.asarray(lengths, dtype=np.int64))


def _between(ends: Ints, index: int) -> slice:
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


def _joined(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Raw:
    """All numbers of some arrays, one after the other."""
    flat = [np.ascontiguousarray(array, dtype).reshape(-1) for array in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat) if flat else np.empty(0, dtype)


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class PackedWindows:
    """Many windows as flat arrays."""

    ids: Ids
    id_ends: Ints  # (windows,)
    rows: Ids
    row_ends: Ints  # (windows,)
    targets: Ids
    target_ends: Ints  # (windows,)
    widths: Ints  # (windows,) targets of each of its rows

    @staticmethod
    def of(windows: Sequence[Window]) -> PackedWindows:
        return PackedWindows(
            ids=_joined([w.ids for w in windows], INT32),
            id_ends=_ends([len(w.ids) for w in windows]),
            rows=_joined([w.rows for w in windows], INT32),
            row_ends=_ends([len(w.rows) for w in windows]),
            targets=_joined([w.targets for w in windows], INT32),
            target_ends=_ends([w.targets.size for w in windows]),
            widths=np.array([w.targets.shape[1] for w in windows], np.int64),
        )

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def lengths(self) -> Ints:
        """Tokens of each window."""
        return np.diff(self.id_ends, prepend=0)

    def window(self, index: int) -> Window:
        rows = self.rows[_between(self.row_ends, index)]
        targets = self.targets[_between(self.target_ends, index)].reshape(len(rows), int(self.widths[index]))
        return Window(self.ids[_between(self.id_ends, index)], rows, targets)

    def arrays(self) -> dict[str, Raw]:
        """The arrays of a message."""
        return {
            "tokens": self.lengths,
            "rows_of": np.diff(self.row_ends, prepend=0),
            "targets_of": self.widths,
            "ids": self.ids,
            "rows": self.rows,
            "targets": self.targets,
        }

    @staticmethod
    def read(message: Message[Any]) -> PackedWindows:
        """Windows from a message that anybody may have written: its arrays fit each other, and no more is known."""
        tokens, rows_of, targets_of = (message.counts(name) for name in ("tokens", "rows_of", "targets_of"))
        if not len(tokens) == len(rows_of) == len(targets_of):
            raise InputError("tokens, rows_of and targets_of do not have one number per window", fix=AGAIN)
        return PackedWindows(
            ids=message.flat("ids", "<i4", tokens),
            id_ends=_ends(tokens),
            rows=message.flat("rows", "<i4", rows_of),
            row_ends=_ends(rows_of),
            targets=message.flat("targets", "<i4", rows_of * targets_of),
            target_ends=_ends(rows_of * targets_of),
            widths=targets_of,
        )


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def flat_columns(answers: Sequence[Answers], columns: Iterable[Column]) -> dict[str, Array]:
    """Columns of some windows, joined: one value per target or row, in the type of the schema."""
    return {c.name: _joined([getattr(own, c.name) for own in answers], c.numpy_type) for c in columns}


@dataclass(frozen=True, slots=True, eq=False)
class PackedAnswers:
    """Answers to some windows, column by column. All of them have the same columns."""

    windows: Ints  # (windows,) which they are
    rows: Ints  # (windows,) rows of each
    widths: Ints  # (windows,) targets of each of its rows
    columns: dict[str, Raw]

    @staticmethod
    def of(found: Sequence[tuple[int, Answers]], schema: Schema) -> PackedAnswers:
        answers = [own for _, own in found]
        first = answers[0]
        columns = flat_columns(answers, (*schema.chosen(first.columns), *((KL,) if first.kl is not None else ())))
        for name in REQUESTED:
            if name != KL.name and getattr(first, name) is not None:
                columns[name] = np.concatenate([getattr(own, name) for own in answers])
        shapes = np.array([own.logprob.shape for own in answers], dtype=np.int64).reshape(-1, 2)
        return PackedAnswers(np.array([i for i, _ in found], np.int64), shapes[:, 0], shapes[:, 1], columns)

    def answers(self, schema: Schema) -> Iterator[tuple[int, Answers]]:
        """Each window with answers of its own memory: what Ray keeps of a block is given back when all are read."""
        cells, rows = _ends(self.rows * self.widths), _ends(self.rows)
        of_targets = {column.name for column in schema.scores if column.per == "target"}
        for i, window in enumerate(self.windows.tolist()):
            shape, found = (int(self.rows[i]), int(self.widths[i])), {}
            for name, column in self.columns.items():
                part = column[_between(cells if name in of_targets else rows, i)].copy()
                found[name] = part.reshape(shape) if name in of_targets else part
            yield window, Answers.of(found)

    @staticmethod
    def read(message: Message[Any], windows: Sequence[Window], schema: Schema, *, with_kl: bool) -> PackedAnswers:
        """Answers to these windows from a message that a server sent: every array has its type and length."""
        shapes = np.array([w.targets.shape for w in windows], np.int64).reshape(-1, 2)
        rows, widths = shapes[:, 0], shapes[:, 1]
        given = schema.chosen(message.places)
        names = [column.name for column in given] + ([KL.name] if with_kl else [])
        wrong = schema.set_problem([column.name for column in given])
        if wrong is not None or set(names) != message.places.keys():
            raise InputError(f"an answer has the columns {', '.join(message.places)[:200]}", fix="send it again")
        counts = {"target": rows * widths, "row": rows}
        columns = (*given, KL) if with_kl else given
        flat = {column.name: message.flat(column.name, column.numpy_type.str, counts[column.per]) for column in columns}
        return PackedAnswers(np.arange(len(windows)), rows, widths, flat)

    @staticmethod
    def most_bytes(windows: Sequence[Window], schema: Schema) -> int:
        """How long the arrays of a right answer to these windows may be."""
        sizes = {per: sum(8 for c in (*schema.scores, KL) if c.per == per) for per in ("target", "row")}
        room = sum(sizes["target"] * w.targets.size + sizes["row"] * len(w.rows) for w in windows)
        return room + ALIGNED * (1 + len(schema.scores))


class AnswerPacker:
    """Collects answers until they are sent together."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.size = schema, 0  # bytes
        self.found: list[tuple[int, Answers]] = []

    def add(self, window: int, answers: Answers) -> None:
        self.found.append((window, answers))
        self.size += sum(column.nbytes for _, column in answers.arrays())

    def fits(self, answers: Answers) -> bool:
        """Has this answer the columns of those before it?"""
        return not self.found or [n for n, _ in answers.arrays()] == [n for n, _ in self.found[0][1].arrays()]

    def take(self) -> PackedAnswers:
        found, self.found, self.size = self.found, [], 0
        return PackedAnswers.of(found, self.schema)


# ── lines of words ───────────────────────────────────────────────────────────────────────────────────────────────────
Words = npt.NDArray[np.int32]
"""Answers of vLLM's workers: a line of int32 words per row. Floats are kept by the bits of their float32; after the
columns comes what was asked for in addition, as a divergence in float64."""

KL_WORDS = 2  # a divergence is one float64


def line_words(k: int) -> int:
    """Words per line of an answer with k targets."""
    return sum(k if column.per == "target" else 1 for column in BUILT_IN.scores)


def read_lines(words: Words, k: int) -> Answers:
    """Answers from lines of words; those after the columns are left alone."""
    words, found, at = np.ascontiguousarray(words), {}, 0
    for column in BUILT_IN.scores:
        count = k if column.per == "target" else 1
        part = words[:, at : at + count] if column.per == "target" else words[:, at]
        floats = column.dtype == "float64"
        found[column.name] = (np.ascontiguousarray(part).view(np.float32) if floats else part).astype(column.dtype)
        at += count
    return Answers.of(found)


def read_divergences(words: Words) -> Floats:
    """KL (m,) from the words (m, KL_WORDS) that follow the columns."""
    return np.ascontiguousarray(words).view(np.float64)[:, 0].copy()


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────
#     SCOREMOD | version, header's length: two uint32 | header: JSON | arrays, each at a multiple of 8 bytes
#
# Everything is little-endian. The header names each array with its type and shape, so the length of a message follows
# from its header, and a message of any other length is refused. Nothing in it is executed, and no array is larger than
# the bytes that came.
MAGIC = b"SCOREMOD"
VERSION = 2
CONTENT_TYPE = "application/x-scoremode"
START = struct.Struct("<8sII")
MOST_HEADER = 1 << 20  # bytes
ALIGNED = 8
AGAIN = "see docs/service.md for the form of a request"

Parts = list[bytes | memoryview]
"""A message in pieces that are sent one after the other, so that a large array is not copied."""

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Described = tuple[Literal["<i4", "<i8", "<f8", "<f4", "<f2", "<u2"], Annotated[list[Size], msgspec.Meta(max_length=2)]]


class Header(msgspec.Struct, kw_only=True, tag_field="kind"):
    """What every message says first: its kind, and its arrays with their types and shapes. Kinds are subclasses."""

    arrays: dict[str, Described] = {}


H = TypeVar("H", bound=Header)


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where an array lies in a message."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout(Generic[H]):
    """A message's header, read and checked."""

    header: H
    places: dict[str, ArrayPlace]
    size: int  # bytes of the whole message


def pack(header: Header, arrays: Mapping[str, Raw]) -> Parts:
    """A message, in pieces."""
    described = {name: (array.dtype.newbyteorder("<").str, list(array.shape)) for name, array in arrays.items()}
    text = msgspec.json.encode(msgspec.structs.replace(header, arrays=described))
    text += b" " * (-(START.size + len(text)) % ALIGNED)
    parts: Parts = [START.pack(MAGIC, VERSION, len(text)) + text]
    for array in arrays.values():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        parts += [raw, b"\0" * (-len(raw) % ALIGNED)]
    return parts


def size_of(parts: Parts) -> int:
    """Bytes of a message in pieces."""
    return sum(len(part) for part in parts)


def read_layout(start: bytes | memoryview, kind: type[H]) -> Layout[H]:
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
        header = msgspec.json.decode(bytes(start[START.size : START.size + length]), type=kind)
    except msgspec.ValidationError as wrong:
        raise InputError(f"the header of this message is wrong: {str(wrong)[:200]}", fix=AGAIN) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise InputError("the header of a message is not JSON", fix="send it again") from None
    places, offset = {}, START.size + length
    for name, (dtype, shape) in header.arrays.items():
        places[name] = ArrayPlace(np.dtype(dtype), tuple(shape), offset)
        offset += places[name].size + (-places[name].size % ALIGNED)
    return Layout(header, places, offset)


class Message(Generic[H]):
    """A whole message. Its arrays are views, and cannot be written to."""

    def __init__(self, data: bytes | memoryview, kind: type[H]) -> None:
        layout = read_layout(data, kind)
        if layout.size != len(data):
            raise InputError(f"a message of {layout.size} bytes came with {len(data)}", fix="send it again")
        self.header, self.places, self._data = layout.header, layout.places, memoryview(data).toreadonly()

    def array(self, name: str, dtype: str, dimensions: int) -> Raw:
        """An array that must have this type, and so many dimensions."""
        place = self.places.get(name)
        if place is None or place.dtype != np.dtype(dtype) or len(place.shape) != dimensions:
            raise InputError(f"the array {name} of {dtype} in {dimensions} dimensions is missing", fix=AGAIN)
        found: Raw = np.frombuffer(self._data[place.offset : place.offset + place.size], place.dtype)
        return found.reshape(place.shape)

    def counts(self, name: str) -> Ints:
        """An array of numbers that count something."""
        found = self.array(name, "<i8", 1)
        if len(found) and not (int(found.min()) >= 0 and int(found.max()) < 1 << 31):
            raise InputError(f"{name} has a number that is not from 0 to 2147483647", fix=AGAIN)
        return found

    def flat(self, name: str, dtype: str, counts: Ints, dimensions: int = 1) -> Raw:
        """An array with so many entries for each window."""
        found, total = self.array(name, dtype, dimensions), sum(counts.tolist())  # in Python: it may be huge
        if total != len(found):
            raise InputError(f"{name} has {len(found)} entries, but the windows need {total}", fix=AGAIN)
        return found
