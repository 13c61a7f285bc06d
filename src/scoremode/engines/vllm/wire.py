"""Packs requests and answers to cross vLLM's process boundary: raw int32, no object per token.

A request travels in ``PoolingParams.extra_kwargs`` as bytes (vLLM would not decode an array on the other side). An
answer is one int32 tensor with one line per row (``read_lines``). A ``Job`` is a window that waits for answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from scoremode.core.scores.answers import Answers, Window
from scoremode.core.scores.messages import from_message, to_message
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE, KL, Array
from scoremode.values import Ids, Ints

KEY = "scoremode"
KERNEL_WORDS = 96  # room for the name of the head's kernel and a note, as JSON, four bytes per word


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


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def pack_words(facts: dict[str, str]) -> list[int]:
    """Packs a small dictionary as ``KERNEL_WORDS`` int32 words; texts that are too long are cut."""
    room = 4 * KERNEL_WORDS
    text = json.dumps(facts)
    while len(text) > room:
        longest = max(facts, key=lambda name: len(facts[name]))
        facts = facts | {longest: facts[longest][: len(facts[longest]) // 2]}
        text = json.dumps(facts)
    words: list[int] = np.frombuffer(text.encode("ascii").ljust(room), "<i4").tolist()
    return words


def unpack_words(words: Words) -> dict[str, str]:
    facts: dict[str, str] = json.loads(np.ascontiguousarray(words, "<i4").tobytes().decode("ascii"))
    return facts


class Carried:
    """What a prompt carries into vLLM's processes."""

    __slots__ = ()

    def to_kwargs(self) -> dict[str, bytes]:
        return {KEY: to_message(self)}

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any] | None) -> Self | None:
        packed = (kwargs or {}).get(KEY)
        return from_message(packed, cls) if packed else None


@dataclass(frozen=True, slots=True, eq=False)
class Request(Carried):
    """The rows and targets to score in one prompt that is sent to vLLM."""

    rows: Ids  # (m,) ascending positions in the prompt
    targets: Ids  # (m, k)
    vocabulary: int = 0  # ids from this one upwards get no probability; 0: all ids count
    gather: bool = False  # reduce the gathered logits instead of each shard's own
    self_test: bool = False  # also answer through the model's own compute_logits
    extra: Literal["", "states", "kl", "head", "kept"] = ""  # states or KL after each line; others instead of lines
    reference: str = ""  # baseline of KL: folder of a reference
    first: int = 0  # where to start: in the reference's rows, or in the head's rows
    count: int = 0  # how many rows of the head


@dataclass(frozen=True, slots=True, eq=False)
class Replay(Carried):
    """A text that is decoded token by token, and what to score in it.

    vLLM prefills the first ``prompt`` tokens. Step 0 follows from the last of them, and step s from the s-th token of
    ``forced``. So step s computes the row at position ``prompt - 1 + s``.
    """

    name: str  # of vLLM's request, which its logits processors are not told
    prompt: int
    forced: Ids  # all tokens after the prompt
    request: Request  # its rows begin at position prompt - 1 or later

    def row_of_step(self) -> Ints:
        """Returns for each step the index of its row among the requested rows, or -1 if its row is not requested."""
        indices = np.full(len(self.forced) + 1, -1, np.int64)
        indices[self.request.rows - (self.prompt - 1)] = np.arange(len(self.request.rows))
        return indices


def states_words(d: int, itemsize: int) -> int:
    """Returns the number of int32 words per hidden state; a state that does not fill its last word is padded."""
    return -(-d * itemsize // 4)


@dataclass(frozen=True, slots=True, eq=False)
class ExtraResults:
    """Results that are requested in addition to the scores."""

    kind: Literal["", "states", "kl"] = ""
    words: int = 0  # int32 words after each line
    reference: str = ""
    offsets: Ints | None = None  # (windows + 1,) row of the reference at which each window begins


@dataclass(slots=True, eq=False)
class Job:
    """A window in flight: the rows that are requested now, and the answers so far, which belong to its last rows."""

    index: int
    window: Window  # the requested part: the whole window, or only the first rows, which the prefix cache skipped
    read_cache: bool
    vocabulary: int  # ids from this one upwards get no probability; 0: all ids count
    extra: ExtraResults
    lines: Words | None = None

    def take(self, lines: Words, block: int) -> Job | None:
        """Adds an answer; returns the job that requests the missing rows, or None if no rows are missing.

        Rows inside a cached prefix are not computed, so they have no answer. They are requested again with a prompt
        that ends with the last missing row: vLLM always computes the last token and the block that contains it.
        """
        lines = lines.reshape(-1, line_words(self.targets) + self.extra.words)
        missing = len(self.window.rows) - len(lines)
        self.lines = lines if self.lines is None else np.concatenate([lines, self.lines])
        if missing == 0:
            return None
        rows = self.window.rows[:missing]
        front = replace(
            self.window, ids=self.window.ids[: int(rows[-1]) + 1], rows=rows, targets=self.window.targets[:missing]
        )
        near_the_end = int(rows[-1]) - int(rows[0]) < block
        cached = self.read_cache and near_the_end and len(lines) > 0
        return Job(self.index, front, cached, self.vocabulary, self.extra, self.lines)

    def request(self, gather: bool) -> Request:
        """Returns the request for vLLM. The window's index in the plan tells where its rows begin in a reference."""
        return Request(
            np.asarray(self.window.rows, np.int32),
            np.asarray(self.window.targets, np.int32),
            vocabulary=self.vocabulary,
            gather=gather,
            extra=self.extra.kind,
            reference=self.extra.reference,
            first=0 if self.extra.offsets is None else int(self.extra.offsets[self.index]),
        )

    @property
    def targets(self) -> int:
        """The number of targets per row."""
        return int(self.window.targets.shape[1])

    def answers(self) -> tuple[Answers, Words]:
        """Returns the answers of all rows, and the extra words after their lines."""
        assert self.lines is not None, "a job without an answer"
        extras = np.ascontiguousarray(self.lines[:, line_words(self.targets) :])
        return read_lines(self.lines, self.targets), extras
