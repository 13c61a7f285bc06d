"""Means over parts of the targets: slices of the text, and stretches of the window (depth.py).

The groups behind the errors are the same as everywhere. Each target counts once, whatever the method's weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import measured
from scoremode.core.scores.columns import Scores
from scoremode.core.statistics.estimate import GroupSums, as_json, exponential, with_error_fields
from scoremode.core.statistics.groups import grouping
from scoremode.core.text.tokens import Tokens
from scoremode.errors import RunError
from scoremode.values import Bools, Estimate, Floats, Ints, Range

if TYPE_CHECKING:
    from scoremode.core.statistics.paired import PairedRuns

Column = tuple[Floats | Bools, Range]
"""A value per target, and what its mean can be."""


def means_by_part(
    columns: Sequence[Column], part: Ints, groups: Ints, count: int, *, finite: bool = True
) -> list[list[Estimate]]:
    """Returns for each of ``count`` parts the mean of each column, over the groups that have values there.

    ``part`` and ``groups`` have the part (0, 1, …) and the group of each target. With ``finite``, other values are left
    out. A part without a value has the mean NaN.
    """
    numbers, group = np.unique(groups, return_inverse=True)
    cells, cell = np.unique(part * len(numbers) + group, return_inverse=True)
    edges = np.searchsorted(cells, np.arange(count + 1) * len(numbers)).tolist()
    sums = [GroupSums(len(cells)) for _ in columns]
    for column_sums, (values, _) in zip(sums, columns, strict=True):
        here = np.isfinite(values) if finite else np.ones(len(values), np.bool_)
        column_sums.add(cell[here], values[here], np.ones(int(here.sum())))
    means = []
    for begin, end in pairwise(edges):
        indices = np.arange(begin, end)
        totals = [column_sums.some(indices[column_sums.denominator[indices] > 0]) for column_sums in sums]
        means.append([column_sums.estimate(within) for column_sums, (_, within) in zip(totals, columns, strict=True)])
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedPart:
    """Means of two runs over some of their targets, with errors over the groups of these targets."""

    kl: Estimate | None  # None: not measured
    delta_logprob: Estimate
    same_top: Estimate | None  # None: not measured
    unbounded: int  # targets that are left out because their KL or their difference of logprobs is not finite

    def as_json(self) -> dict[str, float | str | None]:
        return {
            "targets": self.delta_logprob.n,
            "groups": self.delta_logprob.groups,
            **with_error_fields("kl_mean", self.kl),
            **with_error_fields("delta_logprob_mean", self.delta_logprob),
            **with_error_fields("same_top", self.same_top),
            "unbounded": self.unbounded,
        }


P = TypeVar("P", bound=PairedPart)


def paired_means(runs: PairedRuns, part: Ints, makers: Sequence[Callable[..., P]]) -> list[P]:
    """Returns the means of two runs in parts. Each part has a function that makes its row from means.

    A part without a target is left out.
    """
    with np.errstate(invalid="ignore"):
        delta = runs.cand - runs.base
    is_finite = np.isfinite(delta) if runs.kl is None else np.isfinite(delta) & np.isfinite(runs.kl)
    columns: list[Column] = [(delta, "any"), (~is_finite, "share")]
    if runs.kl is not None:
        columns.append((runs.kl, "positive"))
    if runs.same_first_choice is not None:
        columns.append((runs.same_first_choice, "share"))
    rows = []
    means = means_by_part(columns, part, runs.groups, len(makers))
    for make, (delta_logprob, omitted, *more) in zip(makers, means, strict=True):
        if omitted.n:
            kl = None if runs.kl is None else more[0]
            same_top = None if runs.same_first_choice is None else more[-1]
            unbounded = round(omitted.value * omitted.n)
            rows.append(make(kl=kl, delta_logprob=delta_logprob, same_top=same_top, unbounded=unbounded))
    return rows


# ── slices of a text ──────────────────────────────────────────────────────────────────────────────────────────────────
def metrics_by_slice(plan: Plan, tokens: Tokens, scores: Scores) -> dict[str, Any]:
    """Returns perplexity and mean_nll of each slice that has targets, as a manifest stores them; {} without slices."""
    if tokens.slices is None:
        return {}
    part, count = tokens.slices[plan.target_token].astype(np.int64), len(tokens.slice_names)
    means = means_by_part([(-scores.logprob, "any")], part, grouping(plan).of_target, count, finite=False)
    slices = zip(tokens.slice_names, means, strict=True)
    return {name: as_json({"perplexity": exponential(nll), "mean_nll": nll}) for name, (nll,) in slices if nll.n}


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMeans(PairedPart):
    """Means over the targets of one slice of the text, with errors over the groups of these targets."""

    name: str

    def as_json(self) -> dict[str, float | str | None]:
        return {"slice": self.name, **PairedPart.as_json(self)}


def by_slice(runs: PairedRuns) -> list[SliceMeans]:
    """Returns the means of two runs in the slices of their text; [] if the text has no slices.

    Both runs scored the same text. If only one of them knows its slices, or if they differ, the candidate's count.
    """
    run = runs.candidate if runs.candidate.facts.has("slice") else runs.baseline
    if not run.facts.has("slice"):
        return []
    names = list(run.by_slice())
    codes = {name: code for code, name in enumerate(names)}
    try:
        part = np.fromiter((codes[name] for name in measured(run.facts.slice)), np.int64)
    except KeyError as unknown:
        fix = "score again with --fresh"
        raise RunError(f"the slice {unknown} of {run.path} is not in its manifest", fix=fix) from None
    return paired_means(runs, part, [partial(SliceMeans, name=name) for name in names])
