"""Means over parts of the targets: slices of the text, and stretches of the window (depth.py).

The groups behind the errors are the same as everywhere. Each target counts once, whatever the method's weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import measured
from scoremode.core.statistics.estimate import GroupSums, as_json, exponential, with_error_fields
from scoremode.core.statistics.groups import distinct, grouping
from scoremode.core.statistics.paired import PairedRuns
from scoremode.core.statistics.run import ScoreRows
from scoremode.core.statistics.streams import array_blocks
from scoremode.core.text.tokens import Tokens
from scoremode.errors import RunError
from scoremode.values import Bools, Estimate, Floats, Ints, Range

SUMS = 1 << 20  # sums in memory at a time: with very many groups, the columns are read several times

Parts = Callable[[], Iterable[tuple[Ints, Ints]]]
"""Yields the part (0, 1, …) and the group of each target, in blocks; every call reads from the beginning."""

Columns = Callable[[], Iterable[Sequence[Floats | Bools]]]
"""Yields the blocks of several columns side by side; every call reads from the beginning."""


def means_by_part(
    values: Columns, parts: Parts, count: int, *, ranges: Sequence[Range] = ("any",), finite: bool = True
) -> list[list[Estimate]]:
    """Returns for each of ``count`` parts the mean of each column, over the groups that have values there.

    ``ranges`` has one entry per column. With ``finite``, other values are left out. A part without a value has the
    mean NaN.
    """
    found: list[list[Estimate]] = []
    groups = distinct(group for _, group in parts())
    together = max(1, SUMS // max(1, len(groups) * len(ranges)))
    for begin in range(0, count, together):
        wanted = range(begin, min(count, begin + together))
        sums = [GroupSums(len(wanted) * len(groups)) for _ in ranges]
        for blocks, (part, group) in zip(values(), parts(), strict=True):
            asked = (part >= wanted.start) & (part < wanted.stop)
            cell = (part - wanted.start) * len(groups) + np.searchsorted(groups, group)
            for own, block in zip(sums, blocks, strict=True):
                here = asked & np.isfinite(block) if finite else asked
                own.add(cell[here], block[here], np.ones(int(here.sum())))
        cells = np.split(sums[0].indices, len(wanted))
        for its in cells:
            kept = [own.some(its[own.denominator[its] > 0]) for own in sums]
            found.append([own.estimate(within) for own, within in zip(kept, ranges, strict=True)])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedPart:
    """Means of two runs over some of their targets, with errors over the groups of these targets."""

    kl: Estimate | None  # None: not measured
    delta_logprob: Estimate
    same_top: Estimate | None  # None: not measured
    unbounded: int  # targets that are left out because their KL or their difference of logprobs is not finite

    def as_json(self) -> dict[str, Any]:
        return {
            "targets": self.delta_logprob.n,
            "groups": self.delta_logprob.groups,
            **with_error_fields("kl_mean", self.kl),
            **with_error_fields("delta_logprob_mean", self.delta_logprob),
            **with_error_fields("same_top", self.same_top),
            "unbounded": self.unbounded,
        }


P = TypeVar("P", bound=PairedPart)


def paired_means(runs: PairedRuns, parts: Parts, makers: Sequence[Callable[..., P]]) -> list[P]:
    """Returns the means of two runs in parts, in one pass. Each part has a function that makes its row from means.

    A part without a target is left out.
    """
    has_kl, has_top = runs.kl is not None, runs.has_top

    def columns() -> Iterator[list[Floats | Bools]]:
        for block in runs.blocks():
            with np.errstate(invalid="ignore"):
                delta = block.cand - block.base
            is_finite = np.isfinite(delta) if block.kl is None else np.isfinite(delta) & np.isfinite(block.kl)
            found: list[Floats | Bools] = [delta, ~is_finite]
            found += [block.kl] if block.kl is not None else []
            found += [measured(block.base_top) == measured(block.cand_top)] if has_top else []
            yield found

    rows = []
    ranges: list[Range] = ["any", "share"]
    ranges += ["positive"] if has_kl else []
    ranges += ["share"] if has_top else []
    means = means_by_part(columns, parts, len(makers), ranges=ranges)
    for make, (delta, omitted, *more) in zip(makers, means, strict=True):
        if omitted.n:
            kl, same_top = more[0] if has_kl else None, more[-1] if has_top else None
            unbounded = round(omitted.value * omitted.n)
            rows.append(make(kl=kl, delta_logprob=delta, same_top=same_top, unbounded=unbounded))
    return rows


# ── slices of a text ──────────────────────────────────────────────────────────────────────────────────────────────────
def metrics_by_slice(plan: Plan, tokens: Tokens, scores: ScoreRows) -> dict[str, Any]:
    """Returns perplexity and mean_nll of each slice that has targets, as a manifest stores them; {} without slices."""
    slices = tokens.slices
    if slices is None:
        return {}
    groups = grouping(plan)

    def parts() -> Iterator[tuple[Ints, Ints]]:
        for block in plan.blocks():
            yield slices[block.token].astype(np.int64), groups.of(block)
            tokens.release_pages()

    def losses() -> Iterator[list[Floats]]:
        for block in plan.blocks():
            yield [-scores.rows(block.begin, block.end).logprob]

    means = means_by_part(losses, parts, len(tokens.slice_names), finite=False)
    found = zip(tokens.slice_names, means, strict=True)
    return {name: as_json({"perplexity": exponential(nll), "mean_nll": nll}) for name, (nll,) in found if nll.n}


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMeans(PairedPart):
    """Means over the targets of one slice of the text, with errors over the groups of these targets."""

    name: str

    def as_json(self) -> dict[str, Any]:
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

    def parts() -> Iterator[tuple[Ints, Ints]]:
        for (block,), group in zip(run.facts.blocks("slice"), array_blocks(runs.groups), strict=True):
            try:
                yield np.fromiter((codes[name] for name in block), np.int64, len(block)), group
            except KeyError as unknown:
                fix = "score again with --fresh"
                raise RunError(f"the slice {unknown} of {run.path} is not in its manifest", fix=fix) from None

    return paired_means(runs, parts, [partial(SliceMeans, name=name) for name in names])
