"""Columns -> numbers with errors, grouped by what is independent.

Tokens of one document are not independent of each other, so the error of a mean is computed from group sums: with
group g holding s_g over n_g units, mean = Σs/Σn and var = G/(G-1) · Σ(s_g - mean·n_g)² / (Σn)². Groups are documents
where there are several, else windows; where windows overlap and score tokens twice, stretches of text as long as a
window. One group has no error: None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from scoremode.types import Bools, Estimate, Floats, Ids, Ints, Plan, Scores, TargetBlock, Tokens


def present(numbers: Iterable[Ints]) -> Ints:
    """The numbers that occur, ascending, of what comes block by block."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(np.unique(block) for block in numbers)]))


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """What counts as independent, and which targets of a plan belong together."""

    kind: str
    count: int
    of: Callable[[TargetBlock], Ints]  # the group of each target: 0, 1, …


def grouping(plan: Plan) -> Grouping:
    """Documents where there are several, else windows, else stretches of text as long as a window."""
    documents = present(block.document for block in plan.blocks())
    if len(documents) > 1:
        return Grouping("documents", len(documents), lambda block: np.searchsorted(documents, block.document))
    if plan.scores_once:
        used = np.flatnonzero(plan.target_counts)
        return Grouping("windows", int(used[-1]) + 1 if len(used) else 0, lambda block: block.window)
    longest = int(plan.lengths.max())
    stretches = present(block.token // longest for block in plan.blocks())
    return Grouping(
        "stretches of text", len(stretches), lambda block: np.searchsorted(stretches, block.token // longest)
    )


def groups_of(plan: Plan) -> tuple[str, Ints]:
    """What counts as independent, and the group of each target (0, 1, …)."""
    found, groups = grouping(plan), np.empty(plan.targets, np.int64)
    for block in plan.blocks():
        groups[block.begin : block.end] = found.of(block)
    return found.kind, groups


class GroupSums:
    """Σ numerator and Σ denominator of each group, of targets that come block by block.

    Terms are added one after the other, so the sums do not depend on how targets are cut into blocks.
    """

    def __init__(self, groups: int) -> None:
        self.numerator: Floats = np.zeros(groups)
        self.denominator: Floats = np.zeros(groups)
        self.n = 0

    def add(self, groups: Ints, numerator: Floats | Bools | Ints, denominator: Floats | Ids | Ints) -> None:
        np.add.at(self.numerator, groups, numerator.astype(np.float64, copy=False))
        np.add.at(self.denominator, groups, denominator.astype(np.float64, copy=False))
        self.n += len(groups)

    def estimate(self) -> Estimate:
        """Σ numerator / Σ denominator over all groups, with their error."""
        count, total = len(self.numerator), float(self.denominator.sum())
        if total == 0:
            return Estimate(math.nan, None, self.n, count)
        value = float(self.numerator.sum()) / total
        if count < 2 or not math.isfinite(value):
            return Estimate(value, None, self.n, count)
        residual = self.numerator - value * self.denominator
        variance = count / (count - 1) * float(residual @ residual) / total**2
        return Estimate(value, math.sqrt(variance), self.n, count)


def ratio(numerator: Floats, denominator: Floats | Ids | Ints, groups: Ints) -> Estimate:
    """Σ numerator / Σ denominator over all targets, with the error of its groups."""
    sums = GroupSums(int(groups.max()) + 1 if len(groups) else 0)
    sums.add(groups, numerator, denominator)
    return sums.estimate()


def exponential(mean: Estimate) -> Estimate:
    """exp of an estimate; its error to first order."""
    value = math.exp(mean.value) if not mean.value >= 700 else math.inf
    usable = mean.stderr is not None and math.isfinite(value)
    return Estimate(value, value * mean.stderr if usable and mean.stderr is not None else None, mean.n, mean.groups)


def weights_of(plan: Plan, block: TargetBlock | None = None) -> Floats:
    """How much each target, of a block or of all, counts in the method's mean: a window's mean ``weight`` times."""
    if plan.average != "window":
        n = plan.targets if block is None else len(block)
        return np.broadcast_to(np.float64(1), n)  # ones that take no memory
    assert plan.weight is not None
    weights: Floats = (plan.weight / plan.target_counts)[plan.target_window if block is None else block.window]
    return weights


class ScoreRows(Protocol):
    """Scores that can be asked for piece by piece: in memory, or in a journal."""

    def rows(self, begin: int, end: int) -> Scores: ...


def all_metrics(plan: Plan, tokens: Tokens, scores: ScoreRows) -> dict[str, Estimate]:
    """Every number that a run carries."""
    groups = grouping(plan)
    nll, nats_per_byte, nats_per_word, rank, first, entropy = (GroupSums(groups.count) for _ in range(6))
    texts = _PerplexityOfTexts(plan) if plan.average == "document" else None
    bytes_of, words_of = (_units(plan, *of) for of in _counted(tokens))
    for block in plan.blocks():
        here, index = scores.rows(block.begin, block.end), groups.of(block)
        loss, weight, ones = -here.logprob, weights_of(plan, block), np.ones(len(block))
        nll.add(index, loss * weight, weight)
        nats_per_byte.add(index, loss, bytes_of(block))
        nats_per_word.add(index, loss, words_of(block))
        rank.add(index, here.rank, ones)
        first.add(index, here.rank == 1, ones)
        entropy.add(index, here.entropy, ones)
        if texts:
            texts.add(block, loss)
    mean = nll.estimate()
    return {
        "perplexity": texts.estimate() if texts else exponential(mean),
        "mean_nll": mean,
        "bits_per_byte": _scaled(nats_per_byte.estimate(), 1 / math.log(2)),
        "word_perplexity": exponential(nats_per_word.estimate()),
        "mean_rank": rank.estimate(),
        "top1_accuracy": first.estimate(),
        "mean_entropy": entropy.estimate(),
    }


class _PerplexityOfTexts:
    """Arithmetic mean over documents of exp(mean nll of the document)."""

    def __init__(self, plan: Plan) -> None:
        self.documents = present(block.document for block in plan.blocks())
        self.nll = GroupSums(len(self.documents))

    def add(self, block: TargetBlock, nll: Floats) -> None:
        self.nll.add(np.searchsorted(self.documents, block.document), nll, np.ones(len(nll)))

    def estimate(self) -> Estimate:
        with np.errstate(over="ignore"):
            each = np.exp(self.nll.numerator / self.nll.denominator)
        value = float(each.mean())
        known = len(each) > 1 and math.isfinite(value)
        stderr = float(each.std(ddof=1)) / math.sqrt(len(each)) if known else None
        return Estimate(value, stderr, self.nll.n, len(each))


def _counted(tokens: Tokens) -> tuple[tuple[Ids, Ints], tuple[Ids, Ints]]:
    """Bytes and words: of each token, and of each document's source."""
    return (tokens.byte_len, tokens.doc_bytes), (tokens.word_starts, tokens.doc_words)


def _units(plan: Plan, of_token: Ids, of_document: Ints) -> Callable[[TargetBlock], Ids | Floats]:
    """Bytes or words of each target: of the scored text, or, in lm-eval-rolling, of the whole source documents."""
    if plan.method != "lm-eval-rolling" or plan.mask is not None:
        return lambda block: of_token[block.token]
    seen: Bools = np.zeros(len(of_document), np.bool_)

    def at_first_targets(block: TargetBlock) -> Floats:
        """A document counts once, at its first target."""
        share = np.zeros(len(block))
        documents, firsts = np.unique(block.document, return_index=True)
        new = ~seen[documents]
        share[firsts[new]] = of_document[documents[new]]
        seen[documents] = True
        return share

    return at_first_targets


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    stderr = None if estimate.stderr is None else estimate.stderr * factor
    return Estimate(estimate.value * factor, stderr, estimate.n, estimate.groups)


def llamacpp_stderr(logprob: Floats) -> float | None:
    """The error that llama.cpp prints beside its perplexity: every token taken as independent."""
    n = len(logprob)
    if n < 2:
        return None
    nll = -logprob
    mean = float(nll.mean())
    variance = float((nll**2).mean()) - mean**2
    return math.exp(mean) * math.sqrt(max(0.0, variance) / (n - 1))


def as_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Estimates as plain data; JSON has no infinity: what is infinite becomes null, what does not exist is left out."""
    return {
        name: {"value": finite(e.value), "stderr": finite(e.stderr), "n": e.n, "groups": e.groups}
        for name, e in estimates.items()
        if not math.isnan(e.value)
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
