"""Moves hidden states, heads, columns and 16-bit distributions between files and devices.

An engine that has logits uses logits.py. One that has hidden states passes its answers through ``with_distributions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.base import (
    Baseline,
    StoredDistributions,
    StoredHead,
    Wanted,
    WholeDistributions,
    require_one_vocabulary,
)
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE, Array
from scoremode.errors import EngineError
from scoremode.head.budget import rows_within
from scoremode.head.chunked import LogitsOf, diverge_logits, reduce_logits
from scoremode.head.columns import Columns
from scoremode.head.divergence import Divergence, Kept, divergence_of
from scoremode.head.matrix import Head
from scoremode.head.precision import full_float32
from scoremode.head.sixteen_bits import encode_records, kl_from_records
from scoremode.values import Ints, Raw

IndexedWindow = tuple[int, Window]
"""A window and its index in the plan."""


def to_raw(x: Tensor) -> Raw:
    """A tensor as a NumPy array with the same bits; bfloat16 becomes uint16."""
    x = x.detach().cpu().contiguous()
    raw: Raw = x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return raw


def from_raw(raw: Raw, dtype: str) -> Tensor:
    if not raw.flags.writeable:  # a mapped file: torch must not think that it may write there
        raw = raw.copy()
    x = torch.from_numpy(np.ascontiguousarray(raw))
    return x.view(torch.bfloat16) if dtype == "bfloat16" else x


def store_head(head: Head) -> StoredHead:
    bias = None if head.bias is None else to_raw(head.bias)
    dtypes = [
        str(x.dtype).removeprefix("torch.") for x in (head.weight, head.weight if head.bias is None else head.bias)
    ]
    return StoredHead(to_raw(head.weight), bias, dtypes[0], dtypes[1], head.vocabulary, head.scale, head.softcap)


def split_columns(columns: Columns, ends: Ints) -> list[Answers]:
    """Splits columns into one Answers per window: the only copy from the device, a few numbers per target."""
    found = {
        column.name: getattr(columns, column.name).to(getattr(torch, column.dtype)).cpu().numpy()
        for column in BUILT_IN.scores
    }
    starts = np.concatenate([[0], ends[:-1]])
    return [Answers(**{name: column[a:b] for name, column in found.items()}) for a, b in zip(starts, ends, strict=True)]


def divergence_columns(found: Mapping[str, Tensor | None]) -> dict[str, Array]:
    """The columns of a divergence that were measured, copied from the device: a few numbers per row."""
    given = [(column, found.get(column.name)) for column in DIVERGENCE]
    return {c.name: x.to(getattr(torch, c.dtype)).cpu().numpy() for c, x in given if x is not None}


def split_divergence(found: Divergence, ends: Ints) -> list[Answers]:
    """Splits a divergence and the candidate's columns into one Answers per window."""
    apart = divergence_columns({column.name: getattr(found, column.name) for column in DIVERGENCE})
    starts = np.concatenate([[0], ends[:-1]])
    return [
        answers.apart({name: column[a:b] for name, column in apart.items()})
        for answers, a, b in zip(split_columns(found.q, ends), starts, ends, strict=True)
    ]


def loaded_head(stored: StoredHead, device: torch.device) -> Head:
    """Loads a stored head onto a device."""
    weight = from_raw(stored.weight, stored.dtype)
    if device.type == "cpu":
        weight = weight.float()  # exact, once: half-precision products on a CPU are slow and rounded
    bias = None if stored.bias is None else from_raw(stored.bias, stored.bias_dtype).to(device)
    return Head(weight.to(device), stored.vocabulary, bias, stored.scale, stored.softcap)


# ── baselines ────────────────────────────────────────────────────────────────────────────────────────────────────────
RowsOf = Callable[[slice], Tensor]
"""Some of a window's rows -> what a baseline gives for them, on the device of the candidate."""


class DeviceStates(Protocol):
    """A baseline whose hidden states and head are on the device of the candidate, or come there when asked for."""

    @property
    def head(self) -> Head: ...

    def rows(self, windows: list[IndexedWindow]) -> Tensor:
        """The baseline's hidden states for the rows of these windows, concatenated."""

    def kept(self, windows: list[IndexedWindow]) -> Kept | None:
        """Keeps the baseline's logits for these rows, if more candidates are going to be compared with them."""


class StatesOnDevice:
    """A baseline with hidden states, and its head on the device of the candidate."""

    def __init__(self, baseline: Baseline, device: torch.device, vocabulary: int) -> None:
        require_one_vocabulary(baseline.head.vocabulary, vocabulary)
        self.baseline, self.device = baseline, device
        self.head = loaded_head(baseline.head, device)

    def rows(self, windows: list[IndexedWindow]) -> Tensor:
        """The baseline's hidden states for the rows of these windows, concatenated."""
        raw = [self.baseline.states(index, window) for index, window in windows]
        return torch.cat([from_raw(own, self.baseline.dtype).to(self.device) for own in raw])

    def kept(self, windows: list[IndexedWindow]) -> Kept | None:
        return None

    def window(self, index: int, window: Window) -> RowsOf:
        return self.rows([(index, window)]).__getitem__

    def diverge(self, kept: Tensor, logits: Tensor, targets: Tensor, width: int) -> Divergence:
        """The divergence from the baseline's rows, and the candidate's columns; ids from ``width`` on are left out."""
        return diverge_logits(kept, self.head.within(width), logits[:, :width], targets)


class WholeOnDevice:
    """A baseline with whole distributions: they go to the device of the candidate, a few rows at a time."""

    def __init__(self, baseline: WholeDistributions, device: torch.device, vocabulary: int) -> None:
        require_one_vocabulary(baseline.vocabulary, vocabulary)
        self.baseline, self.device = baseline, device

    def window(self, index: int, window: Window) -> RowsOf:
        if isinstance(self.baseline, StoredDistributions):
            records = self.baseline.records(index, window)
            return lambda rows: to_device(records[rows], self.device)
        logits = self.baseline.logits(index, window)
        return lambda rows: logits(rows).to(self.device)

    def distances(self, kept: Tensor, logits: Tensor, width: int) -> dict[str, Tensor]:
        """The divergence (n,) by column, over the ids below ``width``.

        From stored distributions, it is the KL over all ids: llama.cpp's rule leaves none out. Nothing else is
        measured: the stored probabilities are rounded, and the unlikely ones are cut off.
        """
        if isinstance(self.baseline, StoredDistributions):
            return {"kl": kl_from_records(kept, logits)}
        return divergence_of(kept[:, :width], logits[:, :width])

    def diverge(self, kept: Tensor, logits: Tensor, targets: Tensor, width: int) -> Divergence:
        """The divergence, and the candidate's columns for ids below ``width``."""
        distances = self.distances(kept, logits, width)
        return Divergence(q=reduce_logits(logits[:, :width], targets), **distances)


def to_device(records: Raw, device: torch.device) -> Tensor:
    """Copies uint16 records (n, words), which may lie in a mapped file, to a device as int16 with the same bits."""
    return torch.from_numpy(np.array(records, "<u2").view(np.int16)).to(device)


def load_baseline(
    baseline: Baseline | WholeDistributions, device: torch.device, vocabulary: int
) -> StatesOnDevice | WholeOnDevice:
    """Puts a baseline of any kind on a device; refuses one with a vocabulary of another size."""
    if isinstance(baseline, WholeDistributions):
        return WholeOnDevice(baseline, device, vocabulary)
    return StatesOnDevice(baseline, device, vocabulary)


def records_of_logits(logits: Tensor) -> Raw:
    """Encodes logits (n, vocabulary) as uint16 records (n, words): only these leave the device."""
    return encode_records(logits).cpu().numpy().view(np.uint16)


# ── engines with hidden states ───────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class LogitsOfStates:
    """Computes logits from the hidden states of an engine, which are passed on bit for bit."""

    logits_of: LogitsOf
    dtype: str  # of the states
    device: torch.device
    vocabulary: int

    @staticmethod
    def by(stored: StoredHead, dtype: str, device: torch.device) -> LogitsOfStates:
        """Uses a stored head to compute the logits."""
        return LogitsOfStates(loaded_head(stored, device).logits, dtype, device, stored.vocabulary)

    def records(self, states: Raw) -> Raw:
        return np.concatenate([records_of_logits(self._logits(states[rows])) for rows in self._blocks(states)])

    def distances(self, states: Raw, rows_of: RowsOf, against: WholeOnDevice, width: int) -> dict[str, Array]:
        """The divergence (n,) from a baseline's distributions, which ``rows_of`` gives, to those of the states."""
        parts = [
            divergence_columns(against.distances(rows_of(rows), self._logits(states[rows]), width))
            for rows in self._blocks(states)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _blocks(self, states: Raw) -> Iterator[slice]:
        """Slices of a few rows each, so that their logits stay within the memory budget."""
        step = rows_within(0, self.vocabulary, self.device.type)
        yield from (slice(i, min(i + step, len(states))) for i in range(0, len(states), step))

    @torch.inference_mode()
    def _logits(self, states: Raw) -> Tensor:
        with full_float32():
            return self.logits_of(from_raw(states, self.dtype).to(self.device))[:, : self.vocabulary]


def with_distributions(
    answered: Iterator[tuple[int, Answers]], source: WindowSource, want: Wanted, made: LogitsOfStates
) -> Iterator[tuple[int, Answers]]:
    """Adds the wanted records, or the divergence from whole distributions, to answers that have hidden states.

    Works on one window at a time, so that the distributions of a whole batch are never in memory at once.
    """
    if want.against is not None and not isinstance(want.against, WholeDistributions):
        raise EngineError("records and a divergence from states were asked for at once", fix="ask for one of them")
    against = None if want.against is None else WholeOnDevice(want.against, made.device, made.vocabulary)
    width = min(source.vocabulary or made.vocabulary, made.vocabulary)
    for index, answers in answered:
        states = answers.states
        assert states is not None, "answers without hidden states"
        records = made.records(states) if want.records else None
        apart: dict[str, Array] = {}
        if against is not None:
            apart = made.distances(states, against.window(index, source.window(index)), against, width)
        yield index, replace(answers.apart(apart), records=records, states=states if want.states else None)
