"""What comparisons show beside their numbers: computed once, and shown in the terminal, in JSON and on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scoremode.core import extensions
from scoremode.reports.table import Block, Cell, Column, Note, Row, Table, count, estimate

if TYPE_CHECKING:
    import argparse

    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.statistics.equivalence import Equivalence
    from scoremode.core.statistics.parts import PairedPart
    from scoremode.core.store.run import Run
    from scoremode.reports.command.flags import Flags

OVERLAP = 0.05  # share of the fed tokens that are not scored: with fewer, the depth is that of the context


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A field of each candidate in the JSON, blocks below the table, and a section of the page."""

    field: str
    facts: Callable[[], Sequence[Any]]  # for each candidate; an empty one is left out
    blocks: Callable[[], Sequence[Block]]
    title: str = ""  # of the section
    section: Callable[[], str] = str  # HTML; '' if it has none


@dataclass(frozen=True, slots=True)
class OfferedPart:
    """A part that only some comparisons have: a value of the kind "part" that a wing offers."""

    flags: Flags  # of ``scoremode compare``
    asked: Callable[[argparse.Namespace], Mapping[str, Any]]
    """What ``make`` needs, checked and read before anything is scored; nothing if these comparisons lack the part."""
    arguments: tuple[str, ...]  # of ``sm.report``, for ``make``
    make: Callable[..., ResultPart]  # of comparisons


def offered_parts() -> list[OfferedPart]:
    return extensions.offered("part")


def comparison_parts(
    found: Sequence[Comparison], *, by_depth: bool, beside: Sequence[ResultPart], tested: Sequence[Equivalence]
) -> list[ResultPart]:
    """The parts that these comparisons have, in the order in which they are shown; ``beside`` are those of wings."""
    from scoremode.reports.served import are_variants

    depth = ResultPart("by_depth", lambda: depth_json(found), lambda: depth_blocks(found))
    slices = ResultPart("by_slice", lambda: slices_json(found), lambda: slices_blocks(found))
    facts = [one.as_json() for one in tested]
    equivalence = ResultPart("equivalence", lambda: facts, lambda: equivalence_blocks(tested))
    first = [depth] if by_depth or are_variants(found) else []
    return [*first, slices, *beside, *([equivalence] if tested else [])]


# ── means over parts of the targets ──────────────────────────────────────────────────────────────────────────────────
def depth_json(found: Sequence[Comparison]) -> list[list[dict[str, Any]]]:
    """For each candidate its means, stretch by stretch."""
    return [[means.as_json() for means in c.by_depth()] for c in found]


def slices_json(found: Sequence[Comparison]) -> list[list[dict[str, Any]]]:
    """For each candidate its means, slice by slice."""
    return [[means.as_json() for means in c.by_slice()] for c in found]


def depth_blocks(found: Sequence[Comparison]) -> list[Block]:
    """A table with one row per stretch of depth and one column per candidate, and what a reader must know of it.

    It shows KL, or the difference of logprobs if a candidate has no KL.
    """
    means = [c.by_depth() for c in found]
    if any(len(rows) < 2 for rows in means):
        return []  # a single stretch would repeat the mean
    title = f"{_measure(found)} by depth in the window (distance from its first scored token)"
    rows = [Row(f"{row.first:,} to {row.last:,}") for row in means[0]]
    table = Table(rows, [_targets(means[0]), *_kl_or_delta(found, means)], title)
    notes = [*_left_out(means, "depth"), *_overlap(found[0].baseline)]
    return ["", table, *(Note(note, "yellow") for note in notes)]


def slices_blocks(found: Sequence[Comparison]) -> list[Block]:
    """A table with one row per slice of the text: several measures of one candidate, or one measure of several."""
    means = [{row.name: row for row in c.by_slice()} for c in found]
    known = {name: row for rows in reversed(means) for name, row in rows.items()}  # finished runs may differ in them
    if len(known) < 2:
        return []  # a single slice would repeat the mean
    title, rows = "by slice of the text", list(known.values())
    if len(found) == 1:
        columns = [Column("KL mean", [estimate(row.kl) for row in rows])] if found[0].kl is not None else []
        columns.append(Column("Δ logprob", [estimate(row.delta_logprob) for row in rows]))
        columns.append(Column("same top", [estimate(row.same_top, percent=True) for row in rows]))
    else:
        columns = _kl_or_delta(found, [[its.get(name) for name in known] for its in means])
        title = f"{_measure(found)} {title}"
    notes = _left_out([list(its.values()) for its in means], "slice")
    table = Table(list(map(Row, known)), [_targets(rows), *columns], title)
    return ["", table, *(Note(note, "yellow") for note in notes)]


def run_slices(run: Run) -> list[Block]:
    """The perplexity of each slice of a run's text; nothing if there are less than two."""
    metrics = run.by_slice()
    perplexities = [its["perplexity"] for its in metrics.values()]
    columns = [
        Column("targets", [count(one.n) for one in perplexities]),
        Column("perplexity", [estimate(one) for one in perplexities]),
    ]
    return ["", Table(list(map(Row, metrics)), columns, "by slice of the text")] if len(metrics) > 1 else []


def equivalence_blocks(found: Sequence[Equivalence]) -> list[Block]:
    """The verdict on each candidate, in a sentence."""
    notes = [Note(f"{one.name}: {one.sentence}", "" if one.no_worse else "red") for one in found]
    return ["", Note("change of the log-probability of the right text", "bold"), *notes]


def _measure(found: Sequence[Comparison]) -> str:
    return "KL mean" if all(c.kl is not None for c in found) else "Δ logprob"


def _targets(rows: Sequence[PairedPart]) -> Column:
    return Column("targets", [count(row.delta_logprob.n) for row in rows])


def _kl_or_delta(found: Sequence[Comparison], means: Sequence[Sequence[PairedPart | None]]) -> list[Column]:
    """A column for each candidate: KL, or the difference of logprobs if one of them has no KL."""
    has_kl = all(c.kl is not None for c in found)

    def cell(row: PairedPart | None) -> Cell:
        return estimate(None if row is None else row.kl if has_kl else row.delta_logprob)

    return [Column(c.name, [cell(row) for row in rows], page=c.name) for c, rows in zip(found, means, strict=True)]


def _left_out(means: Sequence[Sequence[PairedPart]], kind: str) -> list[str]:
    from scoremode.reports.text import counted

    omitted = sum(row.unbounded for rows in means for row in rows)
    are = "is" if omitted == 1 else "are"
    return [f"{counted(omitted, 'values')} {are} not finite and left out of the means by {kind}"] if omitted else []


def _overlap(run: Run) -> list[str]:
    """Says that windows overlap, so that the context of a target is longer than its depth."""
    fed, scored = int(run.manifest["forward_tokens"]), int(run.manifest["targets"]) + int(run.manifest["windows"])
    if fed - scored <= OVERLAP * fed:
        return []
    share = f"{100 * (fed - scored) / fed:.0f} %"
    return [
        f"windows overlap: {share} of the fed tokens are context that is not scored, and depth is counted after them; "
        "with --stride equal to --context-length, depth is the length of the context"
    ]
