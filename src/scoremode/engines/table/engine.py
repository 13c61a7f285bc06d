"""An engine whose answers are known in closed form: next-token logits, looked up by the previous token.

It is used in tests, and shows plug-in authors how little an engine must do. The perplexity of a uniform table is
exactly its vocabulary size; the successor table scores log 1 on a counting text and log 0 on anything shifted by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from scoremode.core.engine.base import (
    SCORES,
    Baseline,
    Engine,
    EngineFacts,
    LogitsBaseline,
    NoiseFloor,
    StoredDistributions,
    StoredHead,
    Wanted,
    WholeDistributions,
    require_one_vocabulary,
)
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.core.scores.schema import BUILT_IN
from scoremode.errors import ModelError, did_you_mean
from scoremode.head.budget import FIRST, LEFT_OUT
from scoremode.values import Bools, Floats, Ids, Raw

TABLES = ("uniform", "successor")
NEVER = -3.0e4  # a log-probability whose exponential is 0 even in float64


def require_table(name: str) -> None:
    if name not in TABLES:
        raise ModelError(f"there is no table '{name}'", fix=did_you_mean(name, TABLES))


class TableEngine(Engine):
    """Scores with a table: ``logits[p]`` are the logits after token p, or there is one line for all tokens.

    >>> engine = TableEngine(np.zeros((1, 1000)))
    >>> engine.facts.vocabulary
    1000
    """

    def __init__(self, logits: Floats) -> None:
        assert logits.ndim == 2, "a table has one line per previous token"
        assert len(logits) in (1, logits.shape[1]), "a table has one line, or one per token"
        with np.errstate(divide="ignore"):
            shifted = logits - logits.max(axis=1, keepdims=True)
            self.logprobs: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        self._columns = closed_form(self.logprobs)  # (lines,), or (lines, ids) of a column that has a value per target
        self.facts = EngineFacts(
            engine="table",
            dtype="float64",
            device="cpu",
            head="closed-form",
            vocabulary=logits.shape[1],
            context_length=None,
        )

    @staticmethod
    def named(name: str) -> TableEngine:
        """The table ``uniform``, or ``successor`` (the next id is always the previous id + 1), over bytes."""
        require_table(name)
        if name == "uniform":
            return TableEngine(np.zeros((1, 256)))
        with np.errstate(divide="ignore"):
            return TableEngine(np.log(np.roll(np.eye(256), 1, axis=1)))

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if isinstance(source, Plan) and want == SCORES:
            yield from self._score_plan(source, done)
            return
        divergence = None if want.against is None else _divergence_from(want.against, self.logprobs.shape[1])
        states = np.eye(len(self.logprobs), dtype=np.float32)
        for index in np.flatnonzero(~done).tolist():
            window = source.window(index)
            lines = window.ids[window.rows] if len(self.logprobs) > 1 else np.zeros(len(window.rows), np.int32)
            answers = self._answers(lines, window.targets)
            if want.states:
                answers = replace(answers, states=states[lines])
            if want.records:
                answers = replace(answers, records=self._records(lines))
            if divergence is not None:
                answers = answers.apart(divergence(index, window, self.logprobs[lines]))
            yield index, answers

    def _score_plan(self, plan: Plan, done: Bools) -> Iterator[tuple[int, Answers]]:
        """Scores all windows of a plan at once; each answer is a part of the columns."""
        token, window, edges = plan.target_token, plan.target_window, plan.target_offsets.tolist()
        before = plan.ids[np.maximum(token - 1, 0)]
        fed_first = token == plan.start[window]
        before[fed_first] = plan.lead[window[fed_first]]
        lines = before if len(self.logprobs) > 1 else np.zeros(len(token), np.int32)
        columns = dict(self._answers(lines, plan.ids[token][:, None]).arrays())
        for index in np.flatnonzero(~done).tolist():
            rows = slice(edges[index], edges[index + 1])
            yield index, Answers(**{name: column[rows] for name, column in columns.items()})

    def _records(self, lines: Ids) -> Raw:
        import torch

        from scoremode.core.engine.distributions import records_of_logits

        return records_of_logits(torch.from_numpy(self.logprobs[lines]))

    def stored_head(self) -> StoredHead:
        # a state selects a line of the table by multiplication; -inf times 0 would be NaN, and exp(-30,000) is 0 anyway
        weight = np.maximum(self.logprobs, NEVER).T.astype(np.float32)
        return StoredHead(np.ascontiguousarray(weight), None, "float32", "float32", self.logprobs.shape[1])

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
        return NoiseFloor(None, "the table engine computes in closed form")

    def _answers(self, lines: Ids, targets: Ids) -> Answers:
        """The answers for targets at given lines of the table."""
        each = lines[:, None]
        columns: dict[str, Raw] = {"logprob": self.logprobs[each, targets]}
        for column in BUILT_IN.chosen(self._columns):
            table = self._columns[column.name]
            values = table[each, targets] if column.per == "target" else table[lines]
            columns[column.name] = values.astype(column.numpy_type, copy=False)
        return Answers(**(columns | self._defined(lines, targets, [n for n in BUILT_IN.names if n not in columns])))

    def _defined(self, lines: Ids, targets: Ids, names: Sequence[str]) -> dict[str, Raw]:
        """The columns that have no closed form here, by the head's definition."""
        if not names:
            return {}
        import torch

        from scoremode.head.columns import define_columns

        columns = define_columns(torch.from_numpy(self.logprobs[lines]), torch.from_numpy(targets.astype(np.int64)))
        return {c.name: getattr(columns, c.name).numpy().astype(c.numpy_type) for c in BUILT_IN.chosen(names)}


def closed_form(logp: Floats) -> dict[str, Raw]:
    """Columns computed from rows of log-probabilities: the ranks of all ids, entropies and first choices."""
    p = np.exp(logp)
    order = np.argsort(-logp, axis=1, kind="stable")  # ties go to the lower id
    ranks = np.broadcast_to(np.arange(1, logp.shape[1] + 1, dtype=np.int32), logp.shape)
    rank = np.empty(logp.shape, np.int32)
    np.put_along_axis(rank, order, ranks, axis=1)
    return {
        "rank": rank,
        "entropy": -np.where(p > 0, p * np.where(p > 0, logp, 0.0), 0.0).sum(axis=1),
        "top": logp.argmax(axis=1).astype(np.int32),
        "top_logprob": logp.max(axis=1),
    }


Divergence = Callable[[int, Window, Floats], dict[str, Raw]]
"""A window's index, the window, and the candidate's log-probabilities of its rows -> columns of a divergence."""


def _divergence_from(baseline: Baseline | WholeDistributions, vocabulary: int) -> Divergence:
    if isinstance(baseline, LogitsBaseline):
        require_one_vocabulary(baseline.vocabulary, vocabulary)

        def from_logits(index: int, window: Window, logq: Floats) -> dict[str, Raw]:
            rows = baseline.logits(index, window)(slice(0, len(window.rows)))
            return _distances(rows.double().log_softmax(1).cpu().numpy(), logq)

        return from_logits
    if isinstance(baseline, StoredDistributions):
        require_one_vocabulary(baseline.vocabulary, vocabulary)

        def from_records(index: int, window: Window, logq: Floats) -> dict[str, Raw]:
            import torch

            from scoremode.core.engine.distributions import to_device
            from scoremode.head.sixteen_bits import stored_log_probabilities

            records = to_device(baseline.records(index, window), torch.device("cpu"))
            logp = stored_log_probabilities(records, vocabulary).numpy()
            return {"kl": _kl(np.where(logp > LEFT_OUT, logp, -np.inf), logq)}

        return from_records
    head = baseline.head
    require_one_vocabulary(head.vocabulary, vocabulary)
    if "bfloat16" in (head.dtype, baseline.dtype) or head.bias is not None or head.softcap is not None:
        raise ModelError("a table can only be compared with a table", fix="use a table as the baseline")
    weight = head.weight.astype(np.float64).T

    def from_states(index: int, window: Window, logq: Floats) -> dict[str, Raw]:
        x = baseline.states(index, window).astype(np.float64) @ weight
        x -= x.max(axis=1, keepdims=True)
        return _distances(x - np.log(np.exp(x).sum(axis=1, keepdims=True)), logq)

    return from_states


def _distances(logp: Floats, logq: Floats) -> dict[str, Raw]:
    """Every column of a divergence."""
    orders = (np.argsort(-logs, axis=1, kind="stable")[:, :FIRST] for logs in (logp, logq))
    same = np.equal(*orders).cumprod(axis=1).sum(axis=1)
    return {
        "kl": _kl(logp, logq),
        "kl_reverse": _kl(logq, logp),
        "total_variation": np.minimum(np.abs(np.exp(logp) - np.exp(logq)).sum(axis=1) / 2, 1.0),
        "same_first": np.where(same == logp.shape[1], FIRST, same).astype(np.int32),
    }


def _kl(logp: Floats, logq: Floats) -> Floats:
    p = np.exp(logp)
    with np.errstate(invalid="ignore"):
        kl: Floats = np.where(p > 0, p * (logp - logq), 0.0).sum(axis=1)
    return kl
