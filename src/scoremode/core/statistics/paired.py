"""Reads two runs of one plan together, block by block. Gives values per target, and their means with paired errors.

Both runs scored the same targets, so the difficulty of the text cancels in their difference. Every error here is the
error of such a difference, never of two separate numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from scoremode.core.plan.recipes import methods
from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.estimate import GroupSums, exponential, ratio, transformed, with_bounds
from scoremode.core.statistics.groups import distinct
from scoremode.core.statistics.streams import array_blocks, empty_column, quantiles
from scoremode.core.store.run import Run
from scoremode.errors import RunError
from scoremode.values import Bools, Estimate, Floats, Ids, Ints, Range, release_read_blocks


@dataclass(frozen=True, slots=True, eq=False)
class PairedBlock:
    """Some consecutive targets under both models."""

    base: Floats  # (n,) log-probabilities
    cand: Floats  # (n,)
    base_top: Ids | None  # (n,)
    cand_top: Ids | None  # (n,)
    divergences: Divergences  # (n,) each
    weight: Floats  # (n,)
    groups: Ints  # (n,)
    answer: Bools | None = None  # (n,) targets that are part of an answer; None: the text has no slices

    @property
    def kl(self) -> Floats | None:
        return self.divergences.kl

    @property
    def delta_p(self) -> Floats:
        found: Floats = np.exp(self.cand) - np.exp(self.base)
        return found

    @property
    def moved(self) -> Floats:
        """The differences ln q - ln p. A target of probability zero under both models has not moved."""
        with np.errstate(invalid="ignore"):
            found: Floats = np.where(self.cand == self.base, 0.0, self.cand - self.base)
        return found


Values = Callable[[PairedBlock], Floats | Bools]
"""A number per target of a block."""


@dataclass(frozen=True, eq=False)
class PairedRuns:
    """A baseline and a candidate, target by target. Arrays have one line per target, in plan order."""

    name: str  # name of the candidate, unique among the candidates that are compared together
    baseline: Run
    candidate: Run
    groups: Ints  # (n,) targets of one group are not independent of each other
    weight: Floats  # (n,) weight of a target in the method's mean: 1 unless windows are averaged
    divergences: Divergences  # of the candidate from the baseline, over the whole vocabulary; none between stored runs
    noise_kl: Floats | None  # (m,) KL of the baseline to itself, computed in a different way; None if not measured
    answer: Bools | None = field(default=None, kw_only=True)  # (n,) targets in the slice "answer"; None: no slices

    @property
    def kl(self) -> Floats | None:
        """KL(baseline‖candidate) of each target, (n,) in nats; None if it was not measured."""
        return self.divergences.kl

    @property
    def has_top(self) -> bool:
        """Did both runs measure the first choices of their models?"""
        return self.baseline.scores.has("top") and self.candidate.scores.has("top")

    @property
    def averages_documents(self) -> bool:
        """Is the method's perplexity the arithmetic mean of the documents' perplexities?"""
        method = methods().found.get(self.baseline.manifest["method"])
        return method is not None and method.average == "document"

    def blocks(self) -> Iterator[PairedBlock]:
        """Yields all targets in order without holding columns in memory. Raises RunError for NaN or unequal lengths."""
        lengths = {"groups": len(self.groups), "weight": len(self.weight), **self.divergences.lengths()}
        lengths |= {} if self.answer is None else {"answer": len(self.answer)}
        lengths |= {"the baseline": len(self.baseline.scores), "the candidate": len(self.candidate.scores)}
        for name, length in lengths.items():
            if length != len(self.groups):
                raise RunError(
                    f"{self.name}: {name} has {length} targets instead of {len(self.groups)}",
                    fix="compare runs of one plan",
                )
        self._require_numbers("noise_kl", self.noise_kl)
        names = self.divergences.measured
        sides = [run.scores.blocks("logprob", "top") for run in (self.baseline, self.candidate)]
        if names:
            sides.append(self.divergences.blocks(*names))
        begin = 0
        for number, ((base, base_top), (cand, cand_top), *rest) in enumerate(zip(*sides, strict=True)):
            here, apart = slice(begin, begin + len(base)), dict(zip(names, *rest, strict=True)) if rest else {}
            weight = self.weight[here]
            for name, values in {"weight": weight, **apart, "the baseline": base, "the candidate": cand}.items():
                self._require_numbers(name, values)
            answer, groups = None if self.answer is None else self.answer[here], self.groups[here]
            yield PairedBlock(base, cand, base_top, cand_top, Divergences(**apart), weight, groups, answer)
            begin = here.stop
            release_read_blocks((self.weight, self.groups), number)

    def _require_numbers(self, name: str, values: Floats | None) -> None:
        if values is not None and np.isnan(values).any():
            raise RunError(f"{self.name}: {name} contains NaN", fix="score again with --fresh")

    def document_sums(self) -> GroupSums:
        """Returns each document's perplexity under the candidate (numerator) and under the baseline (denominator)."""
        documents = distinct(document for (document,) in self.baseline.facts.blocks("document"))
        base, cand = GroupSums(len(documents)), GroupSums(len(documents))
        for (document,), block in zip(self.baseline.facts.blocks("document"), self.blocks(), strict=True):
            index, ones = np.searchsorted(documents, document), np.ones(len(document))
            base.add(index, -block.base, ones)
            cand.add(index, -block.cand, ones)
        found = GroupSums(len(documents))
        with np.errstate(over="ignore", invalid="ignore"):
            perplexities = (np.exp(side.numerator / side.denominator) for side in (cand, base))
            found.add(found.indices, *perplexities)
        return found


class PairedMeans:
    """Means over all targets of two runs. One ``gather`` reads the columns once for all its values."""

    def __init__(self, runs: PairedRuns) -> None:
        self.runs = runs
        self.zeros = [0, 0]  # targets of probability zero in the baseline and in the candidate
        self.infinite = 0  # targets with infinite KL
        self.farthest = 0.0  # the largest |ln q - ln p| of a target
        self.delta_p: Floats = np.empty(0)  # (n,) set by ``gather`` with columns
        self._sums: dict[Values, GroupSums] = {}
        self._quantiles: dict[str, dict[str, float]] = {}

    def gather(self, values: Iterable[Values], *, columns: bool = False) -> None:
        """Adds up several values per target in one pass.

        With ``columns``, the same pass counts zeros and infinite KL, finds the target that moved farthest, and stores
        the column of Δp for its quantiles.
        """
        numbers = distinct(array_blocks(self.runs.groups))  # only groups that occur: an empty group would count
        first = GroupSums(len(numbers))
        others = {one: GroupSums(len(numbers), shares=first) for one in dict.fromkeys(values)}
        delta_p, begin = empty_column(len(self.runs.groups) if columns else 0), 0
        for number, block in enumerate(self.runs.blocks()):
            index = np.searchsorted(numbers, block.groups)
            first.add(index, block.weight, block.weight)
            for of, sums in others.items():
                sums.add(index, of(block) * block.weight, None)
            if columns:
                delta_p[begin : begin + len(index)] = block.delta_p
                begin += len(index)
                self.zeros[0] += int(np.isneginf(block.base).sum())
                self.zeros[1] += int(np.isneginf(block.cand).sum())
                self.farthest = max(self.farthest, float(np.abs(block.moved).max(initial=0.0)))
                self.infinite += 0 if block.kl is None else int(np.isinf(block.kl).sum())
                release_read_blocks((delta_p,), number)
        self._sums |= others
        self.delta_p = delta_p if columns else self.delta_p

    def sums(self, values: Values) -> GroupSums:
        if values not in self._sums:
            self.gather([values])
        return self._sums[values]

    def mean(self, values: Values, within: Range = "any") -> Estimate:
        """Returns the mean of a value per target, with the method's weights."""
        return self.sums(values).estimate(within)

    def quantiles(self, column: str, values: Floats, fractions: Mapping[str, float]) -> dict[str, float]:
        """Returns quantiles of a column, by name. The first call for a column computes them."""
        if column not in self._quantiles:
            self._quantiles[column] = quantiles(values, fractions)
        return self._quantiles[column]

    @cached_property
    def documents(self) -> GroupSums | None:
        """The perplexities of all documents if the method averages them, else None."""
        return self.runs.document_sums() if self.runs.averages_documents else None


def mean_differences(runs: Sequence[PairedRuns], pairs: Sequence[tuple[int, int]], values: Values) -> list[Estimate]:
    """Returns the mean difference, target by target, of each pair of candidates; one pass for all pairs of indices."""
    used = sorted({index for pair in pairs for index in pair})
    numbers = distinct(array_blocks(runs[used[0]].groups)) if used else np.zeros(0, np.int64)
    found = [GroupSums(len(numbers)) for _ in pairs]
    for some in zip(*(runs[i].blocks() for i in used), strict=True):
        index, blocks = np.searchsorted(numbers, some[0].groups), dict(zip(used, some, strict=True))
        weighted = {i: values(block) * block.weight for i, block in blocks.items()}
        for (i, j), sums in zip(pairs, found, strict=True):
            sums.add(index, weighted[i] - weighted[j], blocks[i].weight)
    return [sums.estimate() for sums in found]


# ── perplexities ──────────────────────────────────────────────────────────────────────────────────────────────────────
def nll_added(b: PairedBlock) -> Floats:
    return b.base - b.cand


def nll_of_baseline(b: PairedBlock) -> Floats:
    return -b.base


def nll_of_candidate(b: PairedBlock) -> Floats:
    return -b.cand


def stored_metric(side: Literal["baseline", "candidate"], name: str) -> Callable[[PairedMeans], Estimate]:
    """Returns a function that reads a metric from the manifest of the baseline or the candidate."""

    def of(means: PairedMeans) -> Estimate:
        run: Run = getattr(means.runs, side)
        metrics = run.manifest["metrics"]
        return Estimate.from_json(metrics[name]) if name in metrics else Estimate(math.nan, None, 0, 0)

    return of


def ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is not None:
        return means.documents.estimate("positive")
    logarithm = means.mean(nll_added)
    if math.isfinite(logarithm.value):
        return exponential(logarithm)
    without_bound = math.inf if logarithm.value > 0 else math.nan  # of an infinite baseline there is no ratio
    return Estimate(without_bound, None, logarithm.n, logarithm.groups)


def log_ppl_ratio(means: PairedMeans) -> Estimate:
    if means.documents is None:
        return means.mean(nll_added)
    e = means.documents.estimate("positive")
    if not (math.isfinite(e.value) and e.value > 0):
        return Estimate(math.nan, None, e.n, e.groups)
    return transformed(e, lambda x: math.log(x) if x > 0 else -math.inf, 1 / e.value)


def ppl_difference(means: PairedMeans) -> Estimate:
    """exp(mean nll) of the candidate minus that of the baseline, with the error of its first-order expansion.

    Near the means, exp(a) - exp(b) changes by exp(a)·da - exp(b)·db. That is one number per target, so that what both
    runs share cancels before it is squared. It takes a second pass over the columns.
    """
    if (documents := means.documents) is not None:
        moved = documents.numerator - documents.denominator
        return ratio(moved, np.ones(len(moved)), documents.indices)
    cand, base = means.mean(nll_of_candidate), means.mean(nll_of_baseline)
    ppl_cand, ppl_base = exponential(cand).value, exponential(base).value
    value = ppl_cand - ppl_base
    if not math.isfinite(value):
        return Estimate(math.nan, None, cand.n, cand.groups)

    def moves(b: PairedBlock) -> Floats:
        return ppl_cand * (-b.cand - cand.value) - ppl_base * (-b.base - base.value)

    around_zero = means.mean(moves)
    return with_bounds(Estimate(value, around_zero.stderr, cand.n, cand.groups, around_zero.freedom))
