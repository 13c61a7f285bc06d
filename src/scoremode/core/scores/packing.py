"""Packs windows and answers for other processes and machines.

``PackedWindows``   many windows as a few flat arrays: to replicas inside a WindowSubset
``PackedAnswers``   answers to many windows, column by column: back from replicas
``to_message``      typed values that contain arrays, as bytes for a network
``lines``           answers as rows of int32 words, because some engines' workers can return nothing else

The columns, their types and their order follow from the schema everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from scoremode.core.scores.answers import REQUESTED, Answers, Window
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE, KL, Array, chosen_divergences
from scoremode.errors import InputError, harmless
from scoremode.values import Ids, Ints, Raw

INT32 = np.dtype("<i4")


def _ends(lengths: Sequence[int] | Ints) -> Ints:
    return np.cumsum(np.asarray(lengths, dtype=np.int64))


def _between(ends: Ints, index: int) -> slice:
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


def _joined(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Raw:
    """Joins all numbers of some arrays, one after the other."""
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
    widths: Ints  # (windows,) targets per row

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
        return np.diff(self.id_ends, prepend=0)

    def window(self, index: int) -> Window:
        rows = self.rows[_between(self.row_ends, index)]
        targets = self.targets[_between(self.target_ends, index)].reshape(len(rows), int(self.widths[index]))
        return Window(self.ids[_between(self.id_ends, index)], rows, targets)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class PackedAnswers:
    """Answers to some windows, column by column. All answers have the same columns."""

    windows: Ints  # (windows,) index of each window
    rows: Ints  # (windows,) rows of each window
    widths: Ints  # (windows,) targets per row
    columns: dict[str, Raw]

    @staticmethod
    def of(pairs: Sequence[tuple[int, Answers]]) -> PackedAnswers:
        answers = [answer for _, answer in pairs]
        first = answers[0]
        schema = (*BUILT_IN.chosen(first.columns), *chosen_divergences(first.divergences))
        columns = {c.name: _joined([getattr(answer, c.name) for answer in answers], c.numpy_type) for c in schema}
        for name in REQUESTED:
            if name not in columns and getattr(first, name) is not None:
                columns[name] = np.concatenate([getattr(answer, name) for answer in answers])
        shapes = np.array([answer.logprob.shape for answer in answers], dtype=np.int64).reshape(-1, 2)
        return PackedAnswers(np.array([i for i, _ in pairs], np.int64), shapes[:, 0], shapes[:, 1], columns)

    def answers(self) -> Iterator[tuple[int, Answers]]:
        """Yields each window's number and a copy of its answers, so that Ray can free the block when all are read."""
        cells, rows = _ends(self.rows * self.widths), _ends(self.rows)
        of_targets = {column.name for column in BUILT_IN.scores if column.per == "target"}
        for i, window in enumerate(self.windows.tolist()):
            shape, arrays = (int(self.rows[i]), int(self.widths[i])), {}
            for name, column in self.columns.items():
                part = column[_between(cells if name in of_targets else rows, i)].copy()
                arrays[name] = part.reshape(shape) if name in of_targets else part
            yield window, Answers(**arrays)


class AnswerPacker:
    """Collects answers until they are sent together."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self.found: list[tuple[int, Answers]] = []

    def add(self, window: int, answers: Answers) -> None:
        self.found.append((window, answers))
        self.size += sum(column.nbytes for _, column in answers.arrays())

    def fits(self, answers: Answers) -> bool:
        """Does this answer have the same columns as the answers before it?"""
        return not self.found or [n for n, _ in answers.arrays()] == [n for n, _ in self.found[0][1].arrays()]

    def take(self) -> PackedAnswers:
        pairs, self.found, self.size = self.found, [], 0
        return PackedAnswers.of(pairs)


# ── lines of words ───────────────────────────────────────────────────────────────────────────────────────────────────
Words = npt.NDArray[np.int32]
"""Answers of workers: a line of int32 words per row. A float is stored as the bits of its float32. After the columns
come the results that were requested in addition, such as a divergence in float64."""

DIVERGENCE_WORDS = 2 * len(DIVERGENCE)  # each column is one float64; NaN where it was not measured


def line_words(k: int) -> int:
    """Returns the number of words in each line of an answer with k targets per row."""
    return sum(k if column.per == "target" else 1 for column in BUILT_IN.scores)


def read_lines(words: Words, k: int) -> Answers:
    """Reads answers from lines of words; words after the columns are not read."""
    words, columns, at = np.ascontiguousarray(words), {}, 0
    for column in BUILT_IN.scores:
        count = k if column.per == "target" else 1
        part = words[:, at : at + count] if column.per == "target" else words[:, at]
        floats = column.dtype == "float64"
        columns[column.name] = (np.ascontiguousarray(part).view(np.float32) if floats else part).astype(column.dtype)
        at += count
    return Answers(**columns)


def read_divergences(words: Words) -> dict[str, Array]:
    """Reads the columns of a divergence (m,) from the words (m, DIVERGENCE_WORDS) that follow the columns.

    KL is always there; it is NaN if the workers could not compute it. Another column that is NaN was not measured.
    """
    values = np.ascontiguousarray(words).view(np.float64)
    measured = [c for c, numbers in zip(DIVERGENCE, values.T, strict=True) if c is KL or not np.isnan(numbers).any()]
    return {column.name: values[:, DIVERGENCE.index(column)].astype(column.numpy_type) for column in measured}


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────
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
