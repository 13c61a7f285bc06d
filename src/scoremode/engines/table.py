"""An engine whose answers are known in closed form: next-token logits looked up by the token before.

For tests, and to show plug-in authors how little an engine must do. A uniform table's perplexity is its vocabulary
size, to the digit; the successor table scores log 1 on a counting text and log 0 on anything shifted by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scoremode.engines.base import Engine, EngineFacts
from scoremode.errors import ModelError, did_you_mean
from scoremode.types import Answers, Bools, Floats, WindowSource

TABLES = ("uniform", "successor")


def require_table(name: str) -> None:
    """Refuse a table that is not known."""
    if name not in TABLES:
        raise ModelError(f"there is no table '{name}'", fix=did_you_mean(name, TABLES))


class TableEngine(Engine):
    """``logits[p]`` are the logits after token p; one line alone serves every token.

    >>> engine = TableEngine(np.zeros((1, 1000)))
    >>> engine.facts.vocabulary
    1000
    """

    def __init__(self, logits: Floats, context_length: int | None = None) -> None:
        assert logits.ndim == 2, "a table has a line per token before"
        assert len(logits) in (1, logits.shape[1]), "a table has one line, or one per token"
        with np.errstate(divide="ignore"):
            shifted = logits - logits.max(axis=1, keepdims=True)
            self.logprobs: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        self.facts = EngineFacts(
            engine="table",
            dtype="float64",
            device="cpu",
            head="closed-form",
            vocabulary=logits.shape[1],
            context_length=context_length,
        )

    @staticmethod
    def named(name: str) -> TableEngine:
        """``uniform`` or ``successor`` (always the previous id + 1), over bytes."""
        require_table(name)
        if name == "uniform":
            return TableEngine(np.zeros((1, 256)))
        with np.errstate(divide="ignore"):
            return TableEngine(np.log(np.roll(np.eye(256), 1, axis=1)))

    def score(self, source: WindowSource, done: Bools) -> Iterator[tuple[int, Answers]]:
        for index in np.flatnonzero(~done).tolist():
            window = source.window(index)
            before = window.ids[window.rows] if len(self.logprobs) > 1 else np.zeros(len(window.rows), np.int32)
            yield index, self._answers(self.logprobs[before], window.targets.astype(np.int64))

    @staticmethod
    def _answers(logp: Floats, targets: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Answers:
        at_target = np.take_along_axis(logp, targets, axis=1)
        ids = np.arange(logp.shape[1])
        above = logp[:, None, :] > at_target[:, :, None]
        tied_before = (logp[:, None, :] == at_target[:, :, None]) & (ids < targets[:, :, None])
        p = np.exp(logp)
        top = logp.argmax(axis=1)
        return Answers(
            logprob=at_target,
            rank=1 + (above | tied_before).sum(axis=2).astype(np.int64),
            entropy=-np.where(p > 0, p * np.where(p > 0, logp, 0.0), 0.0).sum(axis=1),
            top=top.astype(np.int32),
            top_logprob=logp.max(axis=1),
        )
