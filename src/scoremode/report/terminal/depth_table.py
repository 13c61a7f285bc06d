"""KL by depth in the window, as a table for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from scoremode.report.numbers import rounded
from scoremode.report.terminal.console import BlockTable, TableColumn
from scoremode.report.text import counted, shown
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run
from scoremode.values import Estimate

OVERLAP = 0.05  # share of the fed tokens that are not scored: with fewer, the depth is that of the context


def depth_json(found: Sequence[Comparison]) -> list[list[dict[str, Any]]]:
    """For each candidate its means, stretch by stretch."""
    return [[means.as_json() for means in c.by_depth()] for c in found]


def depth_table(found: Sequence[Comparison]) -> list[Any]:
    """A table with one row per stretch of depth and one column per candidate, and what a reader must know of it.

    It shows KL, or the difference of logprobs if a candidate has no KL.
    """
    means = [c.by_depth() for c in found]
    if any(len(rows) < 2 for rows in means):
        return []  # a single stretch would repeat the mean
    has_kl = all(c.kl is not None for c in found)
    first = means[0]
    names = [f"{row.first:,} to {row.last:,}" for row in first]
    columns = [TableColumn("targets", [f"{row.delta_logprob.n:,}" for row in first])]
    for c, rows in zip(found, means, strict=True):
        columns.append(TableColumn(shown(c.name), [_cell(row.kl if has_kl else row.delta_logprob) for row in rows]))
    title = "KL mean" if has_kl else "Δ logprob"
    words = f"{title} by depth in the window (distance from its first scored token)"
    omitted = sum(row.unbounded for rows in means for row in rows)
    are = "is" if omitted == 1 else "are"
    notes = [f"{counted(omitted, 'values')} {are} not finite and left out of the means by depth"] if omitted else []
    notes += [said] if (said := _overlap(found[0].baseline)) else []
    return ["", Text(words, "bold"), BlockTable(names, columns), *(Text(note, "yellow") for note in notes)]


def _cell(estimate: Estimate | None) -> str:
    """A mean above its error."""
    if estimate is None or not estimate.n:
        return "-"
    return "\n".join(rounded(estimate.value, estimate.stderr)).rstrip()


def _overlap(run: Run) -> str:
    """Says that windows overlap, so that the context of a target is longer than its depth; '' if they do not."""
    fed, scored = int(run.manifest["forward_tokens"]), int(run.manifest["targets"]) + int(run.manifest["windows"])
    unscored = fed - scored
    if unscored <= OVERLAP * fed:
        return ""
    share = f"{100 * unscored / fed:.0f} %"
    return (
        f"windows overlap: {share} of the fed tokens are context that is not scored, and depth is counted after them; "
        "with --stride equal to --context-length, depth is the length of the context"
    )
