"""Tables of comparisons and of runs on the page. All text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from scoremode.core.plan.path import PREFILL
from scoremode.core.statistics.comparison import Comparison, are_of_paths
from scoremode.core.statistics.gate import too_few
from scoremode.core.statistics.statistic import Statistic
from scoremode.core.store.run import NEEDS, Run
from scoremode.errors import RunError
from scoremode.reports.html.provenance import distinct_baselines, run_key, run_name, served_facts
from scoremode.reports.html.templating import as_html, cell_with_error, fill
from scoremode.reports.model_card import markdown
from scoremode.reports.numbers import (
    RUN_MEASURES,
    Statistics,
    baseline_perplexity,
    file_size,
    shown_statistic,
    shown_statistics,
)
from scoremode.reports.publish import compact, metadata
from scoremode.reports.served import ServedModel, baseline_name, in_groups, served, served_manifest
from scoremode.reports.text import (
    NOT_MEASURED,
    counted,
    model_notes,
    noise_words,
    notes_on_candidates,
    path_notes,
    top_words,
)
from scoremode.reports.verdicts import rule_words, verdicts
from scoremode.values import Estimate, usable

BITS = ("Bits/weight", "stored bits per weight, all weights together; the size of the weights below")
SIZE = ("Size", "the stored size of the weights")


def summary_section(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run], more: Sequence[str] = ()
) -> Markup:
    tables = [comparisons_table(comparisons, statistics, more)] if comparisons else []
    tables += [runs_table(alone)] if alone else []
    return fill("summary.html", tables=[*tables, slices_table(comparisons, alone)])


def publish_section(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> Markup:
    """The texts of a model card, to copy; a text that cannot be made is left out, with the reason."""
    found, notes = [], []
    if not comparisons or any(s.get("targets") is None for s in statistics):
        return Markup()
    for title, make in (("Markdown table", markdown), ("Compact table", compact), ("Metadata (model-index)", metadata)):
        try:
            found.append((title, make(comparisons, statistics)))
        except RunError as refused:
            notes.append(f"{title}: {refused}.")
    return fill("publish.html", texts=found, notes=notes)


def measure_cell(measure: Statistic, statistics: Statistics) -> Markup:
    value = statistics.get(measure.name)
    if isinstance(value, bool):
        return Markup("yes" if value else "no")
    return as_html(shown_statistic(measure, statistics))


def size_cell(its: ServedModel) -> Markup:
    """Bits per weight above the size of the weights; '' if neither is known."""
    stored = file_size(its.size) if its.size is not None else ""
    if its.bits_per_weight is None:
        return Markup(stored)
    return Markup(f"{its.bits_per_weight:.2f}" + (f' <span class="error">{stored}</span>' if stored else ""))


# ── comparisons ──────────────────────────────────────────────────────────────────────────────────────────────────────
def comparisons_table(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics], more: Sequence[str] = ()
) -> Markup:
    """One row per candidate, in groups of one format and engine, below the baseline and its noise floor.

    ``more`` are the names of statistics that the table has in addition to the usual ones.
    """
    every = shown_statistics(comparisons, more)
    shown = [m for m in every if m.name in more or any(s.get(m.name) is not None for s in statistics)]
    of_paths = are_of_paths(comparisons)  # which differ by little more than noise: none is best
    marks = {m.name: {} if of_paths else _best_and_worst(m, statistics) for m in shown}
    facts = [served(c) for c in comparisons]
    baselines = distinct_baselines(comparisons, statistics)
    rows = []
    for i, (c, s, its) in enumerate(zip(comparisons, statistics, facts, strict=True)):
        cells = [(m.label, measure_cell(m, s), marks[m.name].get(i)) for m in shown]
        rows.append(_row(c.name, c.candidate, its, cells))
    size = SIZE if any(f.size for f in facts) else None
    size = BITS if any(f.bits_per_weight is not None for f in facts) else size
    size = None if of_paths else size  # one model has one size
    said = [noise_words(c, s) for c, s in baselines] + [top_words(c) for c in comparisons]
    said += [f"baseline: {note}" for c in comparisons for note in model_notes(c.baseline)]
    said += path_notes(comparisons) + notes_on_candidates(comparisons)
    return fill(
        "comparisons_table.html",
        titles=[("Path" if of_paths else "Model", ""), *([size] if size else []), *((m.label, m.about) for m in shown)],
        size=size,
        baselines=[_baseline_rows(c, s, shown, _perplexity_of(c, comparisons, statistics)) for c, s in baselines],
        groups=in_groups(facts),
        rows=rows,
        marked=any(marks.values()),
        verdicts=[(c.name, v) for c, v in zip(comparisons, verdicts(comparisons, statistics), strict=True)],
        verdict_rule=rule_words(comparisons),
        errors="; ".join(dict.fromkeys(_about_errors(c, s) for c, s in baselines)),
        notes=[f"{words[:1].upper()}{words[1:]}." for words in dict.fromkeys(said) if words],
    )


def _row(name: str, run: Run, its: ServedModel, cells: Sequence[Any]) -> dict[str, Any]:
    facts = served_facts(run.manifest, its)
    return {"name": name, "its": its, "size": size_cell(its), "cells": cells, "facts": facts}


def _perplexity_of(c: Comparison, comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """The perplexity of a baseline, with the digits that the candidates compared with it allow."""
    own = run_key(c.baseline)
    return baseline_perplexity([s for d, s in zip(comparisons, statistics, strict=True) if run_key(d.baseline) == own])


def _baseline_rows(c: Comparison, s: Statistics, shown: Sequence[Statistic], perplexity: str) -> dict[str, Any]:
    """The baseline, and its noise floor in the same columns; None stands for a column that does not apply."""
    m = c.baseline.manifest
    own = {
        "ppl_candidate": as_html((perplexity, "")),
        "bits_per_byte_candidate": cell_with_error(s.get("bits_per_byte_baseline")),
    }
    floors = {name: s.get(f"noise_floor_{name}") for name in ("kl_mean", "kl_p99")}
    cells, noise = (
        [(measure.label, known.get(measure.name)) for measure in shown]
        for known in (own, {name: cell_with_error(value) for name, value in floors.items()})
    )
    measured = any(usable(value) is not None for value in floors.values())
    name = PREFILL if c.is_of_paths else baseline_name([c], str(m.get("model", "baseline")))
    row = _row(name, c.baseline, served_manifest(m), cells)
    return row | {"noise": noise if measured else None}


def _about_errors(c: Comparison, s: Statistics) -> str:
    """The groups that the errors of a table are based on, or why there are no errors, in words."""
    kind, groups = str(c.baseline.manifest.get("stderr_groups", "groups")), int(usable(s.get("groups")) or 0)
    known = s.get("worse_stderr") is not None
    return f"± is one standard error over {counted(groups, kind)}" if known else f"No ±: {too_few(groups, kind)}"


def _best_and_worst(measure: Statistic, statistics: Sequence[Statistics]) -> dict[int, str]:
    """The rows with the best and the worst value of a column.

    No rows if all values are equal, or if there are fewer than three: every cell would be the best or the worst.
    """
    values = [(usable(s.get(measure.name)), i) for i, s in enumerate(statistics)]
    costs = {i: measure.cost(value) for value, i in values if value is not None}
    if measure.better == "none" or len(costs) < 3 or len(set(costs.values())) < 2:
        return {}
    ends = {max(costs.values()): "worst", min(costs.values()): "best"}
    return {i: ends[cost] for i, cost in costs.items() if cost in ends}


# ── slices ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def slices_table(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> Markup:
    """What changed in each slice of the text, for each candidate; for runs alone, the perplexity of each slice."""
    tables: list[tuple[str, Sequence[tuple[str, int, Sequence[Estimate | None]]], list[tuple[str, str]]]] = []
    for c in comparisons:
        rows = [(its.name, its.delta_logprob.n, [its.kl, its.delta_logprob, its.same_top]) for its in c.by_slice()]
        tables.append((c.name, rows, [(label, "") for label in ("KL mean", "Δ logprob", "Same top")]))
    for run in alone:
        own = [(name, its["perplexity"].n, [its["perplexity"]]) for name, its in run.by_slice().items()]
        tables.append((run_name(run, alone), own, [("Perplexity", "")]))
    shown = [table for table in tables if len(table[1]) > 1]  # a single slice would repeat the mean
    return fill("slices_table.html", tables=shown) if shown else Markup()


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def runs_table(alone: Sequence[Run]) -> Markup:
    metrics = [run.manifest.get("metrics", {}) for run in alone]
    known = [m for m in RUN_MEASURES if m.name in NEEDS or any(m.name in own for own in metrics)]
    rows = []
    for run, own in zip(alone, metrics, strict=True):
        estimates = [Estimate.from_json(own[m.name]) if own.get(m.name) else None for m in known]
        cells = [(m, e, _groups(e, run) if e else "") for m, e in zip(known, estimates, strict=True)]
        rows.append((run_name(run, alone), len(run.scores), cells))
    missing = [words for run in alone if (words := _not_measured(run, alone))]
    titles = [("Run", ""), ("Tokens", ""), *((m.label, "") for m in known)]
    return fill("runs_table.html", titles=titles, rows=rows, needs=NEEDS, missing=missing, not_measured=NOT_MEASURED)


def _not_measured(run: Run, alone: Sequence[Run]) -> str:
    """Which numbers the engine of a run did not measure, in a sentence; '' if it measured all."""
    metrics = run.manifest.get("metrics", {})
    missing = [m.label for m in RUN_MEASURES if m.name in NEEDS and m.name not in metrics]
    names = [label.partition(",")[0].lower() for label in missing]  # without its unit
    names += [] if run.scores.has("top") else ["first choices"]
    return f"{run_name(run, alone)}: {', '.join(names)} {NOT_MEASURED}." if names else ""


def _groups(estimate: Estimate, run: Run) -> str:
    kind = str(run.manifest.get("stderr_groups", "groups"))
    said = too_few(estimate.groups, kind) if estimate.stderr is None else counted(estimate.groups, kind)
    return f"({said})" if math.isfinite(estimate.value) else ""
