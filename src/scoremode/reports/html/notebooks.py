"""Results as small tables for notebooks, which show the last value of a cell. All text in them is escaped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scoremode.core.statistics.comparison import Comparison, Comparisons
from scoremode.core.store.run import NEEDS, Run
from scoremode.reports.html.page import result_pages
from scoremode.reports.html.provenance import distinct_baselines
from scoremode.reports.html.tables import measure_cell, size_cell
from scoremode.reports.html.templating import as_html, cell_with_error, fill
from scoremode.reports.numbers import RUN_MEASURES, baseline_perplexity, shown_statistics
from scoremode.reports.served import served, served_manifest
from scoremode.reports.text import NOT_MEASURED, noise_words
from scoremode.values import Estimate

PROVENANCE = {"model": "Model", "engine": "Engine", "dtype": "Dtype", "corpus": "Text", "method": "Method"}


def notebook_html(value: Any) -> str | None:
    """A result as a table; None if it has none. ``ArrowTable`` asks for it."""
    shown: dict[type, Callable[[Any], str]] = {
        Run: run_html,
        Comparison: comparison_html,
        Comparisons: comparisons_html,
    }
    shown |= {page.shows: page.in_notebooks for page in result_pages() if page.in_notebooks is not None}
    return next((html(value) for own, html in shown.items() if isinstance(value, own)), None)


def run_html(run: Run) -> str:
    """A run as a table for notebooks: its numbers, then their provenance."""
    m = run.manifest
    rows: list[tuple[str, str]] = []
    for measure in RUN_MEASURES:
        if stored := m.get("metrics", {}).get(measure.name):
            estimate = Estimate.from_json(stored)
            rows.append((measure.label, cell_with_error(estimate.value, estimate.stderr, percent=measure.percent)))
        elif measure.name in NEEDS:
            rows.append((measure.label, NOT_MEASURED))
    rows.append(("Tokens", f"{len(run.scores):,}"))
    rows += [(label, m[name]) for name, label in PROVENANCE.items() if m.get(name) is not None]
    return str(fill("notebook.html", caption="scoremode run", rows=rows))


def comparison_html(comparison: Comparison) -> str:
    """A comparison as a table for notebooks: the candidate's numbers against the baseline's."""
    statistics, its = comparison.statistics(), served(comparison)
    baseline = comparison.baseline.manifest.get("model", "the baseline")
    rows: list[tuple[str, str]] = [("Baseline perplexity", as_html((baseline_perplexity([statistics]), "")))]
    shown = [m for m in shown_statistics([comparison]) if statistics.get(m.name) is not None]
    rows += [(m.label, measure_cell(m, statistics)) for m in shown]
    if not comparison.has_top:
        rows.append(("Same top", NOT_MEASURED))
    if statistics.get("noise_floor_kl_mean") is not None:
        rows.append(("Noise floor, KL mean", cell_with_error(statistics["noise_floor_kl_mean"])))
    if its.line:
        rows.append(("Served", its.line))
    if size := size_cell(its):
        rows.append(("Size" if its.bits_per_weight is None else "Bits/weight", size))
    rows.append(("Tokens", f"{len(comparison.groups):,}"))
    return str(fill("notebook.html", caption=f"{comparison.name} against {baseline}", rows=rows))


def comparisons_html(comparisons: Comparisons) -> str:
    """Several comparisons as one table for notebooks: the baseline, then one row per candidate."""
    statistics = [c.statistics() for c in comparisons]
    measured = {name for s in statistics for name, value in s.items() if value is not None}
    shown = [m for m in shown_statistics(comparisons) if m.column is not None and m.name in measured]
    baselines, rows = distinct_baselines(comparisons, statistics), []
    for c, s in baselines:
        own = as_html((baseline_perplexity([s]), ""))
        its, cells = served_manifest(c.baseline.manifest), (own if m.name == "ppl_candidate" else "" for m in shown)
        rows.append((c.baseline.manifest.get("model", "baseline"), its.line, size_cell(its), *cells))
    rows = list(dict.fromkeys(rows))  # a baseline in memory is scored again for each candidate
    for c, s in zip(comparisons, statistics, strict=True):
        its = served(c)
        rows.append((c.name, its.line, size_cell(its), *(measure_cell(m, s) for m in shown)))
    titles = ["", "Format", "Bits/weight", *(m.label for m in shown)]
    used = [i for i in range(len(titles)) if i == 0 or any(row[i] for row in rows)]
    notes = dict.fromkeys(words for c, s in baselines if (words := noise_words(c, s)))
    lines = [[row[i] for i in used] for row in rows]
    return str(fill("notebook_comparisons.html", titles=[titles[i] for i in used], rows=lines, notes=list(notes)))
