"""Slices of a text: the perplexity of each slice of a run, and what changed in each slice of a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from scoremode.core.plan.plan import Plan
from scoremode.core.statistics.estimate import as_json, exponential
from scoremode.core.statistics.groups import grouping
from scoremode.core.statistics.paired import PairedRuns
from scoremode.core.statistics.parts import PairedPart, means_by_part, paired_means
from scoremode.core.statistics.run import ScoreRows
from scoremode.core.statistics.streams import array_blocks
from scoremode.core.text.tokens import Tokens
from scoremode.errors import RunError
from scoremode.values import Floats, Ints


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
        """The numbers by name; None for those that are not known."""
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
