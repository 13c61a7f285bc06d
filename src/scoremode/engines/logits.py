"""From logits to answers, for engines that have logits and no hidden states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.base import UNIFORM, Want
from scoremode.engines.distributions import IndexedWindow, load_baseline, records_of_logits, split_columns
from scoremode.errors import ModelError
from scoremode.head.budget import rows_within
from scoremode.head.chunked import empty_columns, reduce_logits
from scoremode.head.definition import Columns
from scoremode.plan.windows import Answers, WindowSource
from scoremode.values import Raw


@dataclass(frozen=True, slots=True)
class Reduced:
    """The results of a few rows, still on the device: nothing waits for the device until they are read."""

    columns: Columns
    kl: Tensor | None = None
    records: Raw | None = None


class LogitsReducer:
    """Reduces the logits of a plan's rows to the results that are wanted, a few rows at a time."""

    def __init__(self, source: WindowSource, want: Want, device: torch.device, vocabulary: int) -> None:
        self.want, self.device, self.vocabulary = want, device, vocabulary
        self.width = min(source.vocabulary or vocabulary, vocabulary)
        self.against = None if want.against is None else load_baseline(want.against, device, vocabulary)

    def reduce(self, indexed: IndexedWindow, rows: slice, logits: Tensor) -> list[Reduced]:
        """Reduce the logits (n, vocabulary) of some rows of a window. May overwrite the logits."""
        targets = torch.from_numpy(indexed[1].targets[rows].astype(np.int64)).to(self.device)
        kept = None if self.against is None else self.against.rows([indexed])[rows]
        step = rows_within(0, self.vocabulary, self.device.type)
        blocks = [slice(i, i + step) for i in range(0, len(logits), step)]
        return [self._block(logits[b].float(), targets[b], None if kept is None else kept[b]) for b in blocks]

    def _block(self, logits: Tensor, targets: Tensor, kept: Tensor | None) -> Reduced:
        """Reduce a block of rows; ``kept`` are the baseline's hidden states or records for them."""
        records = records_of_logits(logits) if self.want.records else None
        if self.against is None or kept is None:
            return Reduced(reduce_logits(logits[:, : self.width], targets), None, records)
        found = self.against.diverge(kept, logits, targets, self.width)
        return Reduced(found.q, found.kl, records)

    def answers(self, parts: list[Reduced], targets_per_row: int) -> Answers:
        """The answers of one window, joined from the parts of its rows."""
        if not parts:
            columns = empty_columns(self.device, targets_per_row)
        else:
            columns = Columns.cat([part.columns for part in parts])
        kl = [part.kl for part in parts if part.kl is not None]
        records = [part.records for part in parts if part.records is not None]
        return replace(
            split_columns(columns, np.array([len(columns.logprob)]))[0],
            kl=torch.cat(kl).double().cpu().numpy() if kl else None,
            records=np.concatenate(records) if records else None,
        )


def judge_probe(logits: Tensor, earlier: Tensor, slack: float) -> tuple[str, ...]:
    """Notes on a model, from its logits on a probe; an error if it is not causal and so cannot be scored.

    ``earlier`` are the logits of all rows but the last, computed with a different last token. That may change them by
    at most ``slack`` of the largest logit.
    """
    moved = (earlier - logits[:-1]).abs()
    if moved.numel() and float(moved.max() / logits.abs().max().clamp_min(1.0)) > slack:
        raise ModelError("the model's rows depend on the tokens after them", fix="choose a causal language model")
    return (UNIFORM,) if bool((logits == logits[:, :1]).all()) else ()
