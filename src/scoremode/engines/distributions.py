"""Whole distributions between engines and files in 16 bits: records out of states, and divergences from records.

An engine that has logits uses logits.py, which calls ``diverge_rows`` and ``records_of_logits`` with them. One that has
hidden states passes its answers through ``with_distributions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.base import Baseline, StoredDistributions, StoredHead, Want
from scoremode.engines.tensors import Against, IndexedWindow, from_raw, loaded_head, require_one_vocabulary
from scoremode.errors import EngineError
from scoremode.head.budget import rows_within
from scoremode.head.chunked import LogitsOf, diverge_logits, reduce_logits
from scoremode.head.divergence import Divergence
from scoremode.head.precision import full_float32
from scoremode.head.sixteen_bits import encode_records, kl_from_records
from scoremode.plan.windows import Answers, WindowSource
from scoremode.values import Floats, Raw


class AgainstRecords:
    """A baseline whose distributions were kept, on the device of the candidate."""

    def __init__(self, baseline: StoredDistributions, device: torch.device, vocabulary: int) -> None:
        require_one_vocabulary(baseline.vocabulary, vocabulary)
        self.baseline, self.device = baseline, device

    def records(self, windows: list[IndexedWindow]) -> Tensor:
        """The baseline's records for the rows of these windows, concatenated, as int16."""
        return torch.cat([to_device(self.baseline.records(i, window), self.device) for i, window in windows])


def to_device(records: Raw, device: torch.device) -> Tensor:
    """Records (n, words) of uint16 as int16 with the same bits. They may lie in a mapped file, so they are copied."""
    return torch.from_numpy(np.array(records, "<u2").view(np.int16)).to(device)


def load_baseline(
    baseline: Baseline | StoredDistributions, device: torch.device, vocabulary: int
) -> Against | AgainstRecords:
    """Either kind of baseline on a device; a vocabulary of another size is refused."""
    if isinstance(baseline, StoredDistributions):
        return AgainstRecords(baseline, device, vocabulary)
    return Against(baseline, device, vocabulary)


def divergence_of_logits(
    against: Against | AgainstRecords, windows: list[IndexedWindow], logits: Tensor, targets: Tensor
) -> Divergence:
    """KL from a baseline of either kind and the candidate's columns, from the candidate's logits (n, vocabulary).

    The rows are those that the windows ask for, concatenated; ``targets`` is (n, k). The sums of the divergence are in
    float64. May overwrite the logits.
    """
    return diverge_rows(against, baseline_rows(against, windows), logits, targets, logits.shape[1])


def baseline_rows(against: Against | AgainstRecords, windows: list[IndexedWindow]) -> Tensor:
    """What the baseline kept of the rows of these windows, concatenated: records or hidden states."""
    return against.records(windows) if isinstance(against, AgainstRecords) else against.states(windows)


def diverge_rows(
    against: Against | AgainstRecords, kept: Tensor, logits: Tensor, targets: Tensor, width: int
) -> Divergence:
    """As ``divergence_of_logits``, for rows whose baseline was read already; ids from ``width`` on are left out."""
    if isinstance(against, AgainstRecords):
        kl = kl_from_records(kept, logits)
        return Divergence(kl, reduce_logits(logits[:, :width], targets))
    return diverge_logits(kept, against.head.within(width), logits[:, :width], targets)


def records_of_logits(logits: Tensor) -> Raw:
    """Records (n, words) of uint16 for logits (n, vocabulary): only 16-bit words leave the device."""
    return encode_records(logits).cpu().numpy().view(np.uint16)


# ── engines with hidden states ───────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class LogitsOfStates:
    """How an engine's hidden states, which it gives bit for bit, become logits again."""

    logits_of: LogitsOf
    dtype: str  # of the states
    device: torch.device
    vocabulary: int

    @staticmethod
    def by(stored: StoredHead, dtype: str, device: torch.device) -> LogitsOfStates:
        """By a head that was stored."""
        return LogitsOfStates(loaded_head(stored, device).logits, dtype, device, stored.vocabulary)

    def records(self, states: Raw) -> Raw:
        return np.concatenate([records_of_logits(self._logits(states[rows])) for rows in self._blocks(states)])

    def kl(self, states: Raw, records: Raw) -> Floats:
        """KL from the distributions in ``records``, (n,)."""
        parts = [
            kl_from_records(to_device(records[rows], self.device), self._logits(states[rows])).cpu().numpy()
            for rows in self._blocks(states)
        ]
        found: Floats = np.concatenate(parts)
        return found

    def _blocks(self, states: Raw) -> Iterator[slice]:
        """A few rows at a time, so that their logits stay within the budget."""
        step = rows_within(0, self.vocabulary, self.device.type)
        yield from (slice(i, i + step) for i in range(0, len(states), step))

    @torch.inference_mode()
    def _logits(self, states: Raw) -> Tensor:
        with full_float32():
            return self.logits_of(from_raw(states, self.dtype).to(self.device))[:, : self.vocabulary]


def with_distributions(
    answered: Iterator[tuple[int, Answers]], source: WindowSource, want: Want, made: LogitsOfStates
) -> Iterator[tuple[int, Answers]]:
    """Answers that have hidden states, with the records, or the KL from stored distributions, that are wanted.

    One window at a time, so that the distributions of a whole batch are never in memory at once.
    """
    against = want.against
    if against is not None and not isinstance(against, StoredDistributions):
        raise EngineError("records and a divergence from states were asked for at once", fix="ask for one of them")
    if against is not None:
        require_one_vocabulary(against.vocabulary, made.vocabulary)
    for index, answers in answered:
        states = answers.states
        assert states is not None, "answers without hidden states"
        records = made.records(states) if want.records else None
        kl = None if against is None else made.kl(states, against.records(index, source.window(index)))
        yield index, replace(answers, records=records, kl=kl, states=states if want.states else None)
