"""Tables of comparisons and of runs on the page. All text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from scoremode.report.html.provenance import distinct_baselines, run_name, served_facts
from scoremode.report.html.templating import cell_with_error, fill
from scoremode.report.numbers import RUN_MEASURES, SHOWN, Statistics, file_size, usable
from scoremode.report.served import ServedModel, in_groups, served, served_manifest
from scoremode.report.text import NOT_MEASURED, counted, model_notes, noise_words, top_words
from scoremode.statistics.comparison import Comparison, Statistic
from scoremode.statistics.gate import too_few
from scoremode.store.run import NEEDS, Run
from scoremode.values import Estimate

BITS = ("Bits/weight", "stored bits per weight, all weights together; the size of the weights below")
SIZE = ("Size", "the stored size of the weights")


def summary_section(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]
) -> Markup:
    tables = [comparisons_table(comparisons, statistics)] if comparisons else []
    return fill("summary.html", tables=[*tables, *([runs_table(alone)] if alone else [])])


def measure_cell(measure: Statistic, statistics: Statistics) -> Markup:
    value = statistics.get(measure.name)
    if isinstance(value, bool):
        return Markup("yes" if value else "no")
    return cell_with_error(value, statistics.get(f"{measure.name}_stderr"), percent=measure.percent)


def size_cell(its: ServedModel) -> Markup:
    """Bits per weight above the size of the weights; '' if neither is known."""
    stored = file_size(its.stored_bytes) if its.stored_bytes is not None else ""
    if its.bits_per_weight is None:
        return Markup(stored)
    return Markup(f"{its.bits_per_weight:.2f}" + (f' <span class="error">{stored}</span>' if stored else ""))


# ── comparisons ──────────────────────────────────────────────────────────────────────────────────────────────────────
def comparisons_table(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> Markup:
    """One row per candidate, in groups of one format and engine, below the baseline and its noise floor."""
    shown = [m for m in SHOWN if any(s.get(m.name) is not None for s in statistics)]
    marks = {m.name: _best_and_worst(m, statistics) for m in shown}
    facts = [served(c) for c in comparisons]
    baselines = distinct_baselines(comparisons, statistics)
    rows = []
    for i, (c, s, its) in enumerate(zip(comparisons, statistics, facts, strict=True)):
        cells = [(m.label, measure_cell(m, s), marks[m.name].get(i)) for m in shown]
        rows.append(_row(c.name, c.candidate, its, cells))
    size = SIZE if any(f.stored_bytes for f in facts) else None
    size = BITS if any(f.bits_per_weight is not None for f in facts) else size
    said = [noise_words(c, s) for c, s in baselines] + [top_words(c) for c in comparisons]
    said += [f"baseline: {note}" for c in comparisons for note in model_notes(c.baseline)]
    return fill(
        "comparisons_table.html",
        titles=[("Model", ""), *([size] if size else []), *((m.label, m.about) for m in shown)],
        size=size,
        baselines=[_baseline_rows(c, s, shown) for c, s in baselines],
        groups=in_groups(facts),
        rows=rows,
        marked=any(marks.values()),
        errors="; ".join(dict.fromkeys(_about_errors(c, s) for c, s in baselines)),
        notes=[f"{words[:1].upper()}{words[1:]}." for words in dict.fromkeys(said) if words],
    )


def _row(name: str, run: Run, its: ServedModel, cells: Sequence[Any]) -> dict[str, Any]:
    facts = served_facts(run.manifest, its)
    return {"name": name, "its": its, "size": size_cell(its), "cells": cells, "facts": facts}


def _baseline_rows(c: Comparison, s: Statistics, shown: Sequence[Statistic]) -> dict[str, Any]:
    """The baseline, and its noise floor in the same columns; None stands for a column that does not apply."""
    m = c.baseline.manifest
    own = {
        "ppl_candidate": cell_with_error(s.get("ppl_baseline"), s.get("ppl_baseline_stderr")),
        "bits_per_byte_candidate": cell_with_error(s.get("bits_per_byte_baseline")),
    }
    floors = {name: s.get(f"noise_floor_{name}") for name in ("kl_mean", "kl_p99")}
    cells, noise = (
        [(measure.label, known.get(measure.name)) for measure in shown]
        for known in (own, {name: cell_with_error(value) for name, value in floors.items()})
    )
    measured = any(usable(value) is not None for value in floors.values())
    row = _row(m.get("model", "baseline"), c.baseline, served_manifest(m), cells)
    return row | {"noise": noise if measured else None}


def _about_errors(c: Comparison, s: Statistics) -> str:
    """The groups that the errors of a table are based on, or why there are no errors, in words."""
    kind, groups = str(c.baseline.manifest.get("stderr_groups", "groups")), int(usable(s.get("groups")) or 0)
    known = s.get("worse_stderr") is not None
    return f"± is one standard error over {counted(groups, kind)}" if known else f"No ±: {too_few(groups, kind)}"


def _best_and_worst(measure: Statistic, statistics: Sequence[Statistics]) -> dict[int, str]:
    """The rows with the best and the worst value of a column; no rows if all values are equal."""
    values = [(usable(s.get(measure.name)), i) for i, s in enumerate(statistics)]
    costs = {i: measure.cost(value) for value, i in values if value is not None}
    if measure.better == "none" or len(set(costs.values())) < 2:
        return {}
    ends = {max(costs.values()): "worst", min(costs.values()): "best"}
    return {i: ends[cost] for i, cost in costs.items() if cost in ends}


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
