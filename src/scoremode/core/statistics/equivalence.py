"""Is a candidate worse, and if not, how surely? The signed change of log-probability on texts known to be right.

    change of a target = ln q - ln p      q the candidate, p the baseline; below 0: the right text became less likely
    per_token          = Σ change / Σ targets of all documents, nats per token
    per_document       = Σ change / documents, nats per document: the change of ln P(whole right answer)

KL says how far two models are apart, and not in which direction. A change that is not significant does not show that
models are equal: that needs a test which fails unless the data exclude a difference. Two one-sided tests, with the
margin δ > 0 in nats per token, each at 5 % (Student's t, errors by document):

    no worse    the change is above -δ      t = (change + δ) / stderr is large
    no better   the change is below +δ      t = (δ - change) / stderr is large
    equivalent  both

A few documents that lose much make t too large, so a long tail counts as in the bounds of estimate.py.

The targets are those in the slice ``answer``. A text without slices is taken as right as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scoremode.core.statistics.estimate import LEVEL, GroupSums, beyond, finite_or_none, ratio, with_error_fields
from scoremode.core.statistics.groups import FEWEST, are_blocks, false_of_few, why_unsure
from scoremode.core.statistics.paired import PairedMeans, PairedRuns
from scoremode.core.store.run import Run
from scoremode.errors import OptionError
from scoremode.values import Bools, Estimate, Floats

ANSWER = "answer"  # the slice whose targets are known to be right


def answer_targets(*runs: Run) -> Bools | None:
    """Which targets are in the slice ``answer``, by the first run that knows slices; None if none does."""
    labels = next((run.facts.slice for run in runs if run.facts.slice is not None), None)
    return None if labels is None else np.array([label == ANSWER for label in labels], np.bool_)


def answer_change(b: PairedRuns) -> Floats:
    """The changes of the targets that are known to be right; 0 for the others."""
    change: Floats = b.cand - b.base
    return change if b.answer is None else np.where(b.answer, change, 0.0)


def is_answer(b: PairedRuns) -> Floats:
    """1 for a target that is known to be right."""
    return np.ones(len(b.base)) if b.answer is None else b.answer.astype(np.float64)


def answer_logprob(means: PairedMeans) -> Estimate:
    """The mean change over the targets that are known to be right; NaN if there are none."""
    return _answer_sums(means).estimate("change")


def _answer_sums(means: PairedMeans) -> GroupSums:
    if means.runs.answer is None:
        return means.sums(answer_change)
    changes, answers = means.sums(answer_change), means.sums(is_answer)
    sums = GroupSums(len(changes.indices))
    sums.add(sums.indices, changes.numerator, answers.numerator)
    sums.n = int(np.count_nonzero(means.runs.answer))
    return sums


def change_per_document(runs: PairedRuns) -> Estimate:
    """The mean over documents of their summed changes: how ln P(whole right answer) moved, in nats per document.

    A document without a target that is known to be right is not counted. The error is over the groups of the runs; over
    documents, if a group is only a part of a document.
    """
    documents, first, index = np.unique(runs.baseline.facts.document, return_index=True, return_inverse=True)
    changes, answers = GroupSums(len(documents)), GroupSums(len(documents))
    changes.add(index, answer_change(runs), np.ones(len(index)))
    answers.add(index, is_answer(runs), np.ones(len(index)))
    groups = runs.groups[first]
    if not np.array_equal(groups[index], runs.groups):
        groups = np.arange(len(documents))
    counted = answers.numerator > 0
    _, of_document = np.unique(groups[counted], return_inverse=True)
    return ratio(changes.numerator[counted], np.ones(int(counted.sum())), of_document, "change")


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided tests of a candidate against a margin."""

    name: str  # of the candidate
    margin: float  # δ, nats per token
    per_token: Estimate
    per_document: Estimate
    skewness: float = 0.0  # to expect of the mean per token
    groups: str = "groups"  # what errors are over, in words
    effective: float = math.inf  # how many groups of equal size would tell as much
    few_documents: bool = False  # judge fewer than ENOUGH of them, too

    @property
    def p_worse(self) -> float | None:
        """How likely so good a result is by chance if the candidate is worse by the margin; None if not known."""
        return self._chance(self.per_token.value + self.margin, -self.skewness)

    @property
    def p_better(self) -> float | None:
        """The same for a candidate that is better by the margin."""
        return self._chance(self.margin - self.per_token.value, self.skewness)

    def _chance(self, distance: float, skewness: float) -> float | None:
        """The one-sided p-value of a distance from the margin; None where no error speaks of other texts."""
        e = self.per_token
        if e.stderr is None or e.freedom is None or not math.isfinite(distance) or are_blocks(self.groups):
            return None
        if e.stderr == 0:
            return 0.0 if distance > 0 else 1.0
        return beyond(distance / e.stderr, e.freedom, skewness)

    @property
    def no_worse(self) -> bool:
        """Is it shown that the candidate is no worse than the margin?"""
        return self.p_worse is not None and self.p_worse <= 1 - LEVEL and not self.refusal

    @property
    def no_better(self) -> bool:
        """Is it shown that the candidate is no better than the margin?"""
        return self.p_better is not None and self.p_better <= 1 - LEVEL

    @property
    def refusal(self) -> str:
        """Why nothing can be judged; '' if it can."""
        e = self.per_token
        if math.isnan(e.value) and not e.n:
            return "no target is part of an answer"
        if not math.isfinite(e.value):
            return "a target has probability zero"
        if e.stderr is None:
            return f"{e.groups} {self.groups} give no ± ({FEWEST} are needed)"
        return why_unsure(e.groups, self.effective, self.groups, few_documents=self.few_documents)

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.refusal:
            return f"cannot be judged: {self.refusal}"
        e, margin = self.per_token, f"{self.margin:.12g}"
        change = f"{e.value:+.4g} ± {e.stderr:.2g} nats per token"
        if not self.no_worse:
            is_worse = e.high is not None and e.high < -self.margin
            rate = false_of_few("direction", self.effective, self.groups) if is_worse else ""
            why = "is worse by more" if is_worse else "may be worse by more"
            return f"not shown to be no worse than {margin}, it {why}: {change} (p = {self.p_worse:.2g}){rate}"
        kind = "equivalent within" if self.no_better else "no worse than"
        chance = max(self.p_worse or 0.0, self.p_better or 0.0) if self.no_better else self.p_worse
        rate = false_of_few("no worse", self.effective, self.groups)
        return f"{kind} {margin}, with 95 %: {change} (p = {chance:.2g}){rate}"

    def as_json(self) -> dict[str, float | str | None]:
        """All numbers by name; None for those that are not known."""
        return {
            "margin": self.margin,
            "targets": self.per_token.n,
            "groups": self.per_token.groups,
            "groups_effective": finite_or_none(self.effective),
            **with_error_fields("per_token", self.per_token),
            **with_error_fields("per_document", self.per_document),
            "p_worse": self.p_worse,
            "p_better": self.p_better,
            "no_worse": self.no_worse,
            "equivalent": self.no_worse and self.no_better,
            "sentence": self.sentence,
        }


def require_margin(margin: float) -> None:
    """Refuses a margin that is not a finite number above 0."""
    if not 0 < margin < math.inf:
        message = f"no-worse-than is {margin!r}, which is not a number above 0"
        raise OptionError(message, fix="give nats per token, as in 0.01")


def equivalence(runs: PairedRuns, margin: float, *, few_documents: bool = False) -> Equivalence:
    """Tests whether the candidate is no worse than ``margin`` nats per token on texts that are known to be right."""
    require_margin(margin)
    with np.errstate(invalid="ignore"):  # a target of probability zero gives NaN, which is told
        sums, kind = _answer_sums(PairedMeans(runs)), runs.baseline.group_kind
        per_token = sums.estimate("change")
        skewness = sums.skewness() if per_token.stderr else 0.0
        return Equivalence(
            *(runs.name, float(margin), per_token, change_per_document(runs), skewness),
            *(kind, sums.effective, few_documents),
        )
