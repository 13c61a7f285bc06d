"""Comparisons of models: the table, a verdict on each candidate, and notes, made once for every output; and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from scoremode.core.scores.schema import DIVERGENCE, KL
from scoremode.core.statistics.comparison import BY_NAME, Comparison, are_of_paths
from scoremode.core.statistics.equivalence import Equivalence
from scoremode.core.statistics.groups import are_blocks
from scoremode.core.statistics.parts import PairedPart
from scoremode.core.statistics.statistic import Statistic
from scoremode.errors import RunError
from scoremode.reports.numbers import (
    Statistics,
    baseline_perplexity,
    file_size,
    shown_statistic,
    shown_statistics,
    statistics_for_people,
)
from scoremode.reports.public_text import public_name
from scoremode.reports.ranking import closest_first, pairs_tested, why_not_ranked
from scoremode.reports.served import (
    ServedModel,
    are_variants,
    distinct_baselines,
    in_order,
    run_key,
    served,
    served_facts,
    served_manifest,
)
from scoremode.reports.table import NOTHING, Block, Cell, Column, Note, Row, Table, count, estimate, number, words
from scoremode.reports.text import (
    NOT_MEASURED,
    counted,
    default_text,
    method_words,
    model_notes,
    noise_words,
    path_notes,
    too_few,
    top_words,
)
from scoremode.reports.verdicts import CHANGED, LESS, UNKNOWN, Verdict, rule_words, verdicts
from scoremode.values import usable

SAID_IF_MISSING = {"top", *(column.name for column in DIVERGENCE if column is not KL)}
STYLES = {CHANGED: "yellow", UNKNOWN: "yellow"}
BITS = "stored bits per weight, all weights together; the size of the weights below"


def comparison_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    baseline, statistics = comparisons[0].baseline, [c.statistics() for c in comparisons]
    return {
        "baseline": baseline.manifest["model"],
        "baseline_served": served_manifest(baseline.manifest).as_json(),
        "method": baseline.manifest["method"],
        "plan_digest": baseline.plan_digest,
        "baseline_notes": [*default_text(baseline), *model_notes(baseline)],
        "candidates": [
            {
                **s,
                "verdict": verdict.level,
                "direction": verdict.direction or None,
                "sentence": verdict.sentence,
                "scale": verdict.scale,
                "for_people": statistics_for_people(s, statistics),
                **served(c).as_json(),
                "notes": model_notes(c.candidate),
                "noise_floor_perturbed": c.noise_perturbed if c.noise_kl is not None else None,
                **{name: c.manifest[name] for name in ("kl_missing", "rerun", "promise") if c.manifest.get(name)},
            }
            for c, s, verdict in zip(comparisons, statistics, verdicts(comparisons), strict=True)
        ],
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """What is shown of comparisons in every output."""

    table: Table
    verdicts: Sequence[tuple[int, str, Verdict]]  # number and name of each candidate, in the order of the table
    notes: Sequence[Note]
    rules: Sequence[str]  # what words of the verdicts mean
    methods: Sequence[str]  # how the numbers were reached

    def blocks(self) -> list[Block]:
        """The summary for a terminal."""
        blocks = list[Block]()
        for _, name, verdict in self.verdicts:
            style = "red" if verdict.direction == LESS else STYLES.get(verdict.level, "")
            blocks.append(Note(f"{name}: {verdict.sentence}", style))
            blocks += [Note(verdict.scale, "dim")] if verdict.scale else []
        return [self.table, "", *blocks, "", *self.notes, *(Note(line, "dim") for line in (*self.rules, *self.methods))]


def summary(comparisons: Sequence[Comparison], more: Sequence[str] = ()) -> Summary:
    """``more`` are the names of statistics that the table has in addition to the usual ones."""
    judged, order = verdicts(comparisons), in_order([served(c) for c in comparisons])
    return Summary(
        comparison_table(comparisons, more),
        [(i, comparisons[i].name, judged[i]) for i in order],
        comparison_notes(comparisons),
        rule_words(comparisons, judged),
        list(dict.fromkeys(map(_method_line, comparisons))),
    )


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class _Line:
    """A row, what serves it, and the statistics of a candidate, or the ``own`` cells of a baseline or its noise."""

    row: Row
    its: ServedModel | None
    own: Mapping[str, Cell]
    statistics: Statistics | None = None


def comparison_table(comparisons: Sequence[Comparison], more: Sequence[str] = ()) -> Table:
    """Baselines and their noise floors, then candidates in groups of one format and engine."""
    lines, statistics, of_paths = _lines(comparisons), [c.statistics() for c in comparisons], are_of_paths(comparisons)
    columns = [*_served_columns(lines), *_size_columns(lines, of_paths=of_paths)]
    for statistic in shown_statistics(comparisons, more):
        is_known = statistic.name in more or any(s.get(statistic.name) is not None for s in statistics)
        leaves = statistic.column.leaves if statistic.column and statistic.name not in more else 0
        name = "" if of_paths else statistic.name  # paths has no --columns
        in_terminal = {"title": statistic.column.title, "leaves": leaves, "name": name} if statistic.column else {}
        page = statistic.label if is_known else ""
        columns.append(statistic_column(statistic, lines, page=page, card=statistic.card, **in_terminal))
    kind = comparisons[0].baseline.group_kind.partition(" of ")[0]  # it is a heading
    sizes = [None if line.statistics is None else line.statistics.get("groups") or 0 for line in lines]
    if len({size for size in sizes if size is not None}) > 1:  # else it is said once, below
        groups = [None if size is None else Cell(f"{size:,}") for size in sizes]
        columns.append(Column(kind, groups, page="", leaves=5))
    return Table([line.row for line in lines], columns, corner="")


def card_table(
    comparisons: Sequence[Comparison],
    served_as: tuple[str, Callable[[ServedModel | None], Cell | None]],
    chosen: Mapping[str, str],
) -> Table:
    """A table for a card: a column that says how models were served, then statistics; each with its title."""
    lines, (title, cell) = _lines(comparisons), served_as
    columns = [Column("", [cell(line.its) for line in lines], page="", card=title)]
    columns += [statistic_column(BY_NAME[name], lines, page="", card=title) for name, title in chosen.items()]
    return Table([line.row for line in lines], columns)


def _lines(comparisons: Sequence[Comparison]) -> list[_Line]:
    facts, baselines, lines = [served(c) for c in comparisons], distinct_baselines(comparisons), list[_Line]()
    of_rows = [*(served_manifest(c.baseline.manifest) for c in baselines), *facts]
    for c in baselines:
        model, s = served_manifest(c.baseline.manifest), c.statistics()
        cache = model.kv_cache if are_variants([c]) else ""  # candidates differ in theirs
        name = ", ".join(filter(None, (public_name(c.baseline_name), cache)))
        details = (model.line or "how it was served", served_facts(c.baseline.manifest, model))
        row = Row(name, "baseline", _below(model, of_rows), page_only=bool(lines), details=details, is_reference=True)
        together = [other.statistics() for other in comparisons if run_key(other.baseline) == run_key(c.baseline)]
        cells = {
            "ppl_candidate": Cell(baseline_perplexity(together)),
            "bits_per_byte_candidate": number(s.get("bits_per_byte_baseline")),
        }
        lines.append(_Line(row, model, cells))
        floors = {name: s.get(f"noise_floor_{name}") for name in ("kl_mean", "kl_p99")}
        if any(usable(value) is not None for value in floors.values()):
            row = Row("noise floor", "baseline against itself", page_only=True, is_reference=True)
            lines.append(_Line(row, None, {name: number(value) for name, value in floors.items()}))
    several = len({model.group for model in facts}) > 1
    for i in in_order(facts):
        c, model = comparisons[i], facts[i]
        details = (model.line or "how it was served", served_facts(c.candidate.manifest, model))
        row = Row(c.name, below=_below(model, of_rows), group=model.group if several else "", series=i, details=details)
        lines.append(_Line(row, model, {}, c.statistics()))
    return lines


def _below(model: ServedModel, among: Sequence[ServedModel]) -> list[str]:
    """The format and the engine of a row, if those of other rows differ."""
    facts = [(model.format_and_body, {f.format_and_body for f in among}), (model.engine, {f.engine for f in among})]
    line = ", ".join(fact for fact, all_of_them in facts if fact and len(all_of_them) > 1)
    return [line] if any(len(all_of_them) > 1 for _, all_of_them in facts) else []


def _served_columns(lines: Sequence[_Line]) -> list[Column]:
    """Format and engine on a card, if a format is known or engines differ."""
    facts = [line.its for line in lines if line.its is not None]
    has_format = any(f.format_and_body for f in facts)
    columns = []
    if has_format:
        columns.append(("format", [f.its.format_and_body if f.its else "" for f in lines]))
    if has_format or len({f.engine for f in facts}) > 1:
        columns.append(("engine", [f.its.engine if f.its else "" for f in lines]))
    return [words("", [cell or NOTHING for cell in cells], page="", card=title) for title, cells in columns]


def _size_columns(lines: Sequence[_Line], *, of_paths: bool) -> list[Column]:
    """Bits per weight and sizes. In a terminal, only if the rows differ in how they are served."""
    facts = [line.its for line in lines if line.its is not None]
    candidates = [line.its for line in lines if line.statistics is not None and line.its is not None]
    overall = any("-bit layers" in f.format_and_body for f in facts)
    terminal = card = page = about = ""
    if any(f.bits_per_weight is not None for f in candidates):
        card = "bits overall" if overall else "bits per weight"
        page, about = "Bits/weight", BITS
    elif any(f.size is not None for f in candidates):
        page, about = "Size", "the stored size of the weights"
    if any(f.bits_per_weight is not None for f in facts) and any(line.row.below for line in lines):
        terminal = "bits\noverall" if overall else "bits"
    bits = [bits_cell(line.its) for line in lines]
    columns = [Column(terminal, bits, page="", card=card, leaves=1)] if terminal or card else []
    if page:
        with_size = [size_and_bits(line.its) for line in lines]
        columns.append(Column("", with_size, page="" if of_paths else page, about=about, card="" if card else "size"))
    return columns  # one model has one size, so paths show none


def bits_cell(model: ServedModel | None) -> Cell | None:
    return None if model is None or model.bits_per_weight is None else Cell(f"{model.bits_per_weight:.2f}")


def size_and_bits(model: ServedModel | None) -> Cell | None:
    """Bits per weight above the size of the weights, as far as they are known."""
    if model is None or (model.size is None and model.bits_per_weight is None):
        return None
    stored = "" if model.size is None else file_size(model.size)
    return Cell(stored) if model.bits_per_weight is None else Cell(f"{model.bits_per_weight:.2f}", stored)


def statistic_column(statistic: Statistic, lines: Sequence[_Line], **how: Any) -> Column:
    cells = [_cell(statistic, line) for line in lines]
    return Column(**{"title": "", "cells": cells, "about": statistic.about, **how})


def _cell(statistic: Statistic, line: _Line) -> Cell | None:
    if (s := line.statistics) is None:
        return line.own.get(statistic.name)
    value = s.get(statistic.name)
    if value is None and statistic.needs in SAID_IF_MISSING:
        return Cell(NOT_MEASURED)
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    return Cell(*shown_statistic(statistic, s))


# ── notes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def comparison_notes(comparisons: Sequence[Comparison]) -> list[Note]:
    """What a reader must know: the noise floor, notes on models, what is missing, and who cannot be told apart."""
    baselines = distinct_baselines(comparisons)
    notes = [Note(line, "yellow") for c in baselines for line in default_text(c.baseline)]
    notes += [Note(line) for line in dict.fromkeys(map(noise_words, baselines)) if line]
    of_models: dict[str, list[str]] = {}  # by note, because many models may share one
    for run in dict.fromkeys([*(c.baseline for c in baselines), *(c.candidate for c in comparisons)]):
        for note in model_notes(run):
            name = run.manifest.get("variant") or public_name(str(run.manifest.get("model", "model")))
            of_models.setdefault(note, []).append(name)
    notes += [Note(f"{', '.join(dict.fromkeys(names))}: {note}", "yellow") for note, names in of_models.items()]
    missing = [*(c.manifest.get("kl_missing") for c in comparisons), *map(top_words, comparisons)]
    notes += [Note(str(why)) for why in dict.fromkeys(missing) if why]
    notes += [Note(line, "red" if ": finding: " in line else "dim") for line in path_notes(comparisons)]
    if len(comparisons) < 2 or any(c.kl is None or c.is_of_paths for c in comparisons):
        return notes
    if why := why_not_ranked(comparisons):
        return [*notes, Note(why, "yellow")]
    pairs = pairs_tested(comparisons)
    with suppress(RunError, ValueError):  # candidates of different baselines or texts have no order
        seen, before = set[int](), len(notes)
        for i, tied in closest_first(comparisons):
            seen.add(i)
            if others := [comparisons[j].name for j in tied if j not in seen]:
                notes.append(Note(f"cannot be told apart: {comparisons[i].name} from {', '.join(others)}", "yellow"))
        if pairs:
            all_apart = len(notes) == before and len(seen) == len(comparisons)
            notes.append(Note(f"all are told apart by mean KL: {pairs}" if all_apart else pairs, "dim"))
    return notes


def _method_line(c: Comparison) -> str:
    m, s = c.baseline.manifest, c.statistics()
    groups = int(usable(s.get("groups")) or 0)
    kind = c.baseline.group_kind
    rests_on = _rests_on(s, groups, kind) if s.get("worse_stderr") is not None else too_few(groups, kind)
    return f"{method_words(m)}, {counted(int(usable(s.get('targets')) or 0), 'targets')}, {rests_on}"


def _rests_on(s: Statistics, groups: int, kind: str) -> str:
    """What errors rest on: how many groups, how many hold half of the KL, and what may be missing among them."""
    effective, half, unseen = (usable(s.get(name)) for name in ("groups_effective", "kl_half_groups", "unseen_share"))
    if are_blocks(kind):
        effective = half = unseen = None  # they are one text, whatever their number
    parts = [] if effective is None or groups - effective < 0.05 else [f"worth {effective:.1f} of equal length"]
    parts += [] if half is None else [f"{half:.0f} of them hold{'s' * (half == 1)} half of the KL"]
    parts += [] if unseen is None else [f"kinds of text rarer than {unseen:.0%} may be missing"]
    return f"± over {counted(groups, kind)}" + (f" ({'; '.join(parts)})" if parts else "")


# ── means over parts of the targets ──────────────────────────────────────────────────────────────────────────────────
def depth_blocks(comparisons: Sequence[Comparison]) -> list[Block]:
    """A table with one row per stretch of depth and one column per candidate, and what a reader must know of it.

    It shows KL, or the difference of logprobs if a candidate has no KL.
    """
    means = [c.by_depth() for c in comparisons]
    if any(len(rows) < 2 for rows in means):
        return []  # a single stretch would repeat the mean
    title = f"{_measure(comparisons)} by depth in the window (distance from its first scored token)"
    rows = [Row(f"{row.first:,} to {row.last:,}") for row in means[0]]
    table = Table(rows, [_targets(means[0]), *_kl_or_delta(comparisons, means)], title)
    return ["", table, *(Note(note, "yellow") for note in _left_out(means, "depth"))]


def slices_blocks(comparisons: Sequence[Comparison]) -> list[Block]:
    """A table with one row per slice of the text: several measures of one candidate, or one measure of several."""
    means = [{row.name: row for row in c.by_slice()} for c in comparisons]
    parts = {name: row for rows in reversed(means) for name, row in rows.items()}  # finished runs may differ in them
    if len(parts) < 2:
        return []  # a single slice would repeat the mean
    title, rows = "by slice of the text", list(parts.values())
    if len(comparisons) == 1:
        columns = [Column("KL mean", [estimate(row.kl) for row in rows])] if comparisons[0].kl is not None else []
        columns.append(Column("Δ logprob", [estimate(row.delta_logprob) for row in rows]))
        columns.append(Column("same top", [estimate(row.same_top, percent=True) for row in rows]))
    else:
        columns = _kl_or_delta(comparisons, [[slices.get(name) for name in parts] for slices in means])
        title = f"{_measure(comparisons)} {title}"
    notes = _left_out([list(slices.values()) for slices in means], "slice")
    table = Table(list(map(Row, parts)), [_targets(rows), *columns], title)
    return ["", table, *(Note(note, "yellow") for note in notes)]


def equivalence_blocks(tests: Sequence[Equivalence]) -> list[Block]:
    """The verdict on each candidate, in a sentence."""
    notes = [Note(f"{test.name}: {test.sentence}", "" if test.no_worse else "red") for test in tests]
    return ["", Note("change of the log-probability of the right text", "bold"), *notes]


def _measure(comparisons: Sequence[Comparison]) -> str:
    return "KL mean" if all(c.kl is not None for c in comparisons) else "Δ logprob"


def _targets(rows: Sequence[PairedPart]) -> Column:
    return Column("targets", [count(row.delta_logprob.n) for row in rows])


def _kl_or_delta(comparisons: Sequence[Comparison], means: Sequence[Sequence[PairedPart | None]]) -> list[Column]:
    """A column for each candidate: KL, or the difference of logprobs if one of them has no KL."""
    has_kl = all(c.kl is not None for c in comparisons)

    def cell(row: PairedPart | None) -> Cell:
        return estimate(None if row is None else row.kl if has_kl else row.delta_logprob)

    return [Column(c.name, [cell(r) for r in rows], page=c.name) for c, rows in zip(comparisons, means, strict=True)]


def _left_out(means: Sequence[Sequence[PairedPart]], kind: str) -> list[str]:
    omitted = sum(row.unbounded for rows in means for row in rows)
    are = "is" if omitted == 1 else "are"
    return [f"{counted(omitted, 'values')} {are} not finite and left out of the means by {kind}"] if omitted else []
