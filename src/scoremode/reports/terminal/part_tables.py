"""Means over parts of the targets, as tables for a terminal and as JSON: depth in the window, slices of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.equivalence import Equivalence
from scoremode.core.statistics.parts import PairedPart
from scoremode.core.store.run import Run
from scoremode.reports.terminal.console import BlockTable, TableColumn
from scoremode.reports.text import counted, shown
from scoremode.values import Estimate, rounded

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
    names = [f"{row.first:,} to {row.last:,}" for row in means[0]]
    columns = [_targets(means[0]), *_kl_or_delta(found, means)]
    words = f"{_measure(found)} by depth in the window (distance from its first scored token)"
    notes = _left_out(means, "depth")
    notes += [said] if (said := _overlap(found[0].baseline)) else []
    return ["", Text(words, "bold"), BlockTable(names, columns), *(Text(note, "yellow") for note in notes)]


def slices_json(found: Sequence[Comparison]) -> list[list[dict[str, Any]]]:
    """For each candidate its means, slice by slice."""
    return [[means.as_json() for means in c.by_slice()] for c in found]


def slices_table(found: Sequence[Comparison]) -> list[Any]:
    """A table with one row per slice of the text: several measures of one candidate, or one measure of several."""
    means = [{row.name: row for row in c.by_slice()} for c in found]
    known = {name: row for rows in reversed(means) for name, row in rows.items()}  # finished runs may differ in them
    if len(known) < 2:
        return []  # a single slice would repeat the mean
    columns = _kl_or_delta(found, [[rows.get(name) for name in known] for rows in means])
    if len(found) == 1:
        columns = [replace(columns[0], title=_measure(found))]
        columns += [TableColumn("Δ logprob", [_cell(row.delta_logprob) for row in known.values()])] * (
            found[0].kl is not None
        )
        columns += [TableColumn("same top", [_cell(row.same_top, percent=True) for row in known.values()])]
    words = "by slice of the text" if len(found) == 1 else f"{_measure(found)} by slice of the text"
    table = BlockTable(list(map(shown, known)), [_targets(list(known.values())), *columns])
    notes = _left_out([list(rows.values()) for rows in means], "slice")
    return ["", Text(words, "bold"), table, *(Text(note, "yellow") for note in notes)]


def run_slices_table(run: Run) -> list[Any]:
    """The perplexity of each slice of a run's text; nothing if there are less than two."""
    metrics = run.by_slice()
    if len(metrics) < 2:
        return []
    perplexities = [its["perplexity"] for its in metrics.values()]
    columns = [
        TableColumn("targets", [f"{one.n:,}" for one in perplexities]),
        TableColumn("perplexity", [" ".join(rounded(one.value, one.stderr)).rstrip() for one in perplexities]),
    ]
    return ["", Text("by slice of the text", "bold"), BlockTable(list(map(shown, metrics)), columns)]


def equivalence_lines(found: Sequence[Equivalence]) -> list[Any]:
    """The verdict of each candidate, in a sentence."""
    lines = [Text(shown(f"{one.name}: {one.sentence}"), "" if one.no_worse else "red") for one in found]
    return ["", Text("change of the log-probability of the right text", "bold"), *lines]


def _measure(found: Sequence[Comparison]) -> str:
    return "KL mean" if all(c.kl is not None for c in found) else "Δ logprob"


def _targets(rows: Sequence[PairedPart]) -> TableColumn:
    return TableColumn("targets", [f"{row.delta_logprob.n:,}" for row in rows])


def _kl_or_delta(found: Sequence[Comparison], means: Sequence[Sequence[PairedPart | None]]) -> list[TableColumn]:
    """A column for each candidate: KL, or the difference of logprobs if one of them has no KL."""
    has_kl = all(c.kl is not None for c in found)
    cells = (
        [_cell(None if row is None else row.kl if has_kl else row.delta_logprob) for row in rows] for rows in means
    )
    return [TableColumn(shown(c.name), its) for c, its in zip(found, cells, strict=True)]


def _left_out(means: Sequence[Sequence[PairedPart]], kind: str) -> list[str]:
    omitted = sum(row.unbounded for rows in means for row in rows)
    are = "is" if omitted == 1 else "are"
    return [f"{counted(omitted, 'values')} {are} not finite and left out of the means by {kind}"] if omitted else []


def _cell(estimate: Estimate | None, *, percent: bool = False) -> str:
    if estimate is None or not estimate.n:
        return "-"
    return "\n".join(rounded(estimate.value, estimate.stderr, percent=percent)).rstrip()


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
