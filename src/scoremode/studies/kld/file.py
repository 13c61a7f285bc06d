"""llama.cpp's file of base logits (``.kld``): a baseline's distributions in 16 bits, little-endian, without a version.

offset   bytes                   content
0        8                       _logits_
8        4 · 3                   int32: tokens per chunk (n_ctx), ids of the vocabulary, chunks
20       4 · chunks · n_ctx      int32: the tokens from the tokenizer, even where the model was fed a BOS instead
then, per chunk, one record of ``words`` uint16 for each of its rows n_ctx/2 … n_ctx-2; row r predicts token r + 1:
         4                       float32 scale: nats between two codes
         4                       float32 log-probability of code 0
         2 · vocabulary          uint16 codes; log p = scale · code + log-probability of code 0
         2                       zero, only if the vocabulary is odd

A logit more than FLOOR below the largest is stored as if it were exactly FLOOR below. ``llama-perplexity
--kl-divergence-base`` writes such files. They may be large and untrusted. So the sizes in the header are checked
against the file's size before anything is allocated, and the records are mapped, never read as a whole.

While it is being written, a file has its final size but no magic number at its start, so nobody takes it for a
complete file.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from scoremode.core.disk.files import disk_errors, write_at
from scoremode.core.disk.stores import store_of
from scoremode.core.disk.uri import RemotePath, may_be_stored, name_in, stored_at
from scoremode.core.engine.base import StoredDistributions
from scoremode.core.reading import open_regular
from scoremode.core.scores.answers import Answers, Window
from scoremode.errors import EngineError, InputError, RunError
from scoremode.head.budget import FLOOR, LARGEST_CODE, LEFT_OUT, words_of
from scoremode.values import Ids, Ints, Raw

MAGIC = b"_logits_"
HEADER = struct.Struct("<8s3i")
SUFFIX = ".kld"
BLOCK_BYTES = 16 << 20  # of float32 log-probabilities in memory at once
SLACK = 1e-3  # how far the sum of a sound record's probabilities may be from 1, apart from ids on the floor
AGAIN = "make it again with llama-perplexity --kl-divergence-base, or with scoremode reference --kld"


@dataclass(frozen=True, slots=True)
class KldLayout:
    """The sizes in the header of a file, and the sizes and offsets that follow from them.

    >>> KldLayout(context=512, vocabulary=49152, chunks=4).size
    100286452
    """

    context: int
    vocabulary: int
    chunks: int

    @property
    def rows(self) -> int:
        """The number of records per chunk: one for each row of its second half that has a target."""
        return self.context - 1 - self.context // 2

    @property
    def words(self) -> int:
        return words_of(self.vocabulary)

    @property
    def start(self) -> int:
        return HEADER.size + 4 * self.chunks * self.context

    @property
    def size(self) -> int:
        return self.start + 2 * self.words * self.chunks * self.rows

    def offset(self, chunk: int) -> int:
        return self.start + 2 * self.words * self.rows * chunk

    def beginning(self, tokens: Ids) -> bytes:
        """Returns the bytes before the first record: the header, and the tokens (chunks, context)."""
        assert tokens.shape == (self.chunks, self.context)
        header = HEADER.pack(MAGIC, self.context, self.vocabulary, self.chunks)
        return header + np.ascontiguousarray(tokens, "<i4").tobytes()


def is_kld(name: str | Path) -> bool:
    """Is this a file of base logits, by its name or by its first bytes?"""
    path = Path(name)
    if isinstance(name, str) and may_be_stored(name):
        return name_in(name).endswith(SUFFIX)
    try:
        if not path.is_file():
            return path.suffix == SUFFIX and not path.is_dir()
        with open_regular(path) as file:
            return path.suffix == SUFFIX or file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return path.suffix == SUFFIX


def tokens_in(file: IO[bytes]) -> Ids | None:
    """The tokens of a finished file; None if this is none."""
    try:
        layout = _read_layout(Path("FILE"), file.read(HEADER.size), os.fstat(file.fileno()).st_size)
    except (InputError, OSError):  # also of a file elsewhere
        return None
    tokens = np.frombuffer(file.read(layout.start - HEADER.size), "<i4")
    return tokens.reshape(layout.chunks, layout.context)


class KldFile:
    """A file of base logits. It is checked when it is opened, and its records are mapped."""

    def __init__(self, path: str | Path) -> None:
        where = stored_at(path)
        self.path = store_of(where).copy_of_file(where) if isinstance(where, RemotePath) else where
        try:
            with open_regular(self.path) as file:
                self.layout = _read_layout(self.path, file.read(HEADER.size), os.fstat(file.fileno()).st_size)
                self._stamp = _stamp(os.fstat(file.fileno()))
                tokens = np.fromfile(file, "<i4", self.layout.chunks * self.layout.context)
        except FileNotFoundError:
            raise InputError(f"there is no file {path}", fix="check its name") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{path} cannot be read ({why})", fix="check the file") from None
        self.tokens: Ids = tokens.astype(np.int32).reshape(self.layout.chunks, self.layout.context)
        wrong = (self.tokens < 0) | (self.tokens >= self.layout.vocabulary)
        if wrong.any():
            raise _damaged(
                path, f"it has the token {int(self.tokens[wrong][0])} and a vocabulary of {self.layout.vocabulary:,}"
            )

    @cached_property
    def _mapped(self) -> npt.NDArray[np.uint16]:
        shape = (self.layout.chunks, self.layout.rows, self.layout.words)
        return np.memmap(self.path, np.dtype("<u2"), "r", self.layout.start, shape)

    def records(self, chunk: int) -> Raw:
        """Returns the records of a chunk (rows, words), mapped. Raises RunError if the file changed after opening."""
        try:
            unchanged = _stamp(self.path.stat()) == self._stamp
        except OSError:
            unchanged = False
        if not unchanged:
            raise RunError(f"{self.path} was changed while it was in use", fix="run the same command again")
        records: Raw = self._mapped[chunk]
        return records


class KldDistributions(StoredDistributions):
    """Distributions in a file; window i of the plan is chunk i of the file, unless ``chunks`` are given."""

    def __init__(self, file: KldFile, chunks: Ints | None = None) -> None:
        self.file: KldFile = file
        self.vocabulary, self.chunks = file.layout.vocabulary, chunks
        self.least_kl = least_divergence(self.vocabulary)

    @classmethod
    def at(cls, where: str) -> KldDistributions:
        return cls(KldFile(where))

    def part(self, windows: Ints) -> KldDistributions:
        return KldDistributions(self.file, windows)

    def records(self, index: int, window: Window) -> Raw:
        records = self.file.records(index if self.chunks is None else int(self.chunks[index]))
        assert len(records) == len(window.rows), "a record for each row"
        return records


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _damaged(path: str | Path, why: str) -> InputError:
    return InputError(f"{path} is damaged: {why}", fix=AGAIN)


def _read_layout(path: Path, header: bytes, size: int) -> KldLayout:
    """Reads the sizes in a header, and checks that the file has the length that follows from them."""
    if header[: len(MAGIC)] != MAGIC:
        raise InputError(
            f"{path} is not a file of base logits: it does not begin with {MAGIC.decode()}",
            fix="give a file that llama-perplexity --kl-divergence-base wrote",
        )
    if len(header) < HEADER.size:
        raise _damaged(path, "it ends in its header")
    _, context, vocabulary, chunks = HEADER.unpack(header)
    for unit, value, least in (("tokens of a chunk", context, 3), ("ids", vocabulary, 2), ("chunks", chunks, 1)):
        if value < least:
            raise _damaged(path, f"its header gives {value} as the number of {unit}")
    layout = KldLayout(context, vocabulary, chunks)
    if size != layout.size:
        sizes = f"{chunks:,} chunks of {context:,} tokens, {vocabulary:,} ids"
        raise InputError(
            f"{path} has {size:,} bytes, and its header ({sizes}) asks for {layout.size:,}",
            fix=f"if its writer was interrupted, {AGAIN}" if size < layout.size else AGAIN,
        )
    return layout


# ── what records say ─────────────────────────────────────────────────────────────────────────────────────────────────
def steps_and_lowest(records: Raw) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns the two floats of each record: nats between two codes, and the log-probability of code 0."""
    floats = np.ascontiguousarray(records[:, :4]).view("<f4")
    return floats[:, 0], floats[:, 1]


@dataclass(slots=True)
class Coarseness:
    """Measures how coarse the distributions read so far are, because they are stored in 16 bits."""

    rows: int = 0
    ids: int = 0
    ids_on_floor: int = 0
    targets_on_floor: int = 0
    largest_step: float = 0.0

    def add(self, codes: Raw, at_target: Raw, scale: npt.NDArray[np.float32]) -> None:
        """Adds some rows: their codes (n, vocabulary), the codes of their targets, and their steps."""
        has_floor = scale * LARGEST_CODE >= FLOOR - SLACK  # in other rows, code 0 is the least logit itself
        self.rows += len(codes)
        self.ids += codes.size
        self.ids_on_floor += codes[has_floor].size - int(np.count_nonzero(codes[has_floor]))
        self.targets_on_floor += int((at_target[has_floor] == 0).sum())
        self.largest_step = max(self.largest_step, float(scale.max()))

    def notes(self) -> tuple[str, ...]:
        floor = "none lies that low"
        if self.ids_on_floor:
            floor = f"{self.ids_on_floor / self.ids:.1%} of the entries lie on that floor"
        if self.targets_on_floor:
            floor += f", and {self.targets_on_floor:,} of {self.rows:,} targets, which makes its perplexity too low"
        return (
            f"16-bit baseline: log-probabilities in steps of {self.largest_step:.3g} nats, cut off {FLOOR:g} nats "
            f"below the largest; {floor}",
            f"KL by llama.cpp's rule: probabilities as stored, without those below e^{LEFT_OUT:g}; it may be slightly "
            "negative",
        )


def read_scores(file: KldFile, chunk: int, targets: Ids, seen: Coarseness) -> Answers:
    """Returns the scores of a chunk's ``targets`` (m,), read a few rows at a time. Refuses impossible records."""
    records, vocabulary = file.records(chunk), file.layout.vocabulary
    parts, count = [], max(1, BLOCK_BYTES // (4 * vocabulary))
    for begin in range(0, len(records), count):
        block, wanted = records[begin : begin + count], targets[begin : begin + count]
        scale, lowest = steps_and_lowest(block)
        most = (FLOOR + SLACK) / LARGEST_CODE
        sound = (scale >= 0) & (scale <= most) & (lowest <= 0) & np.isfinite(lowest)  # False for NaN
        if not sound.all():
            row = int(sound.argmin())
            floats = f"the step {scale[row]:g} and the least value {lowest[row]:g}"
            raise _damaged(file.path, f"row {begin + row} of chunk {chunk} has {floats}")
        if block[:, 4 + vocabulary :].any():
            raise _damaged(file.path, f"the word after the {vocabulary:,} ids of a row in chunk {chunk} is not zero")
        codes = block[:, 4 : 4 + vocabulary]
        sums = np.exp(scale[:, None] * codes + lowest[:, None]).sum(axis=1, dtype=np.float64)
        # rounding and the floor change a sum a little; a record with a larger error has no log-probabilities
        sound = (sums >= 1 - SLACK) & (sums <= 1 - least_divergence(vocabulary))
        if not sound.all():
            row = int(sound.argmin())
            total = f"sum to {sums[row]:.4g} instead of 1"
            raise _damaged(file.path, f"the probabilities of row {begin + row} in chunk {chunk} {total}")
        rows, top = np.arange(len(block)), codes.argmax(axis=1)
        seen.add(codes, codes[rows, wanted], scale)
        at_target, at_top = (scale.astype(np.float64) * codes[rows, ids] + lowest for ids in (wanted, top))
        parts.append((at_target, top, at_top))
    logprob, tops, top_logprob = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Answers(logprob[:, None], top=tops.astype(np.int32), top_logprob=top_logprob)


def least_divergence(vocabulary: int) -> float:
    """Returns the lowest divergence by llama.cpp's rule: minus the probability that rule and rounding leave out."""
    return -float(SLACK + vocabulary * np.exp(-FLOOR))


# ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class KldWriter:
    """Writes the records of chunks in any order. A killed writer can resume. The caller must hold a lock."""

    def __init__(self, path: Path, layout: KldLayout, tokens: Ids) -> None:
        """Creates the file, or opens it to resume if its sizes and tokens are the same."""
        self.path, self.layout = path, layout
        start = layout.beginning(tokens)[len(MAGIC) :]
        with disk_errors(path.parent):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            is_whole = os.fstat(self._file).st_size == layout.size
            self.is_new = not is_whole or os.pread(self._file, len(start), len(MAGIC)) != start
            if self.is_new:
                os.ftruncate(self._file, 0)
                write_at(self._file, bytes(len(MAGIC)) + start, 0)
                os.ftruncate(self._file, layout.size)

    def write(self, chunk: int, records: Raw) -> None:
        """Writes the records (rows, words) of a chunk, and waits until they are on disk."""
        assert records.shape == (self.layout.rows, self.layout.words)
        assert records.dtype == np.uint16
        scale, lowest = steps_and_lowest(records)
        if not (np.isfinite(scale) & (scale >= 0) & np.isfinite(lowest) & (lowest < 0)).all():
            raise EngineError(
                f"the distributions of chunk {chunk} cannot be kept: a logit is NaN or infinite",
                fix="try --dtype float32; if it stays, the weights are damaged",
            )
        with disk_errors(self.path.parent):
            write_at(self._file, np.ascontiguousarray(records).data, self.layout.offset(chunk))
            os.fsync(self._file)

    def finish(self, target: Path) -> None:
        """Writes the magic number and renames the file to ``target``, when all chunks are written."""
        with disk_errors(self.path.parent):
            write_at(self._file, MAGIC, 0)
            os.fsync(self._file)
            os.replace(self.path, target)

    def close(self) -> None:
        os.close(self._file)
