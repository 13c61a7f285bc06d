"""Small HTML tables for notebooks, which show the last value of a cell. All text in them is escaped.

``install`` adds ``_repr_html_`` to runs and comparisons. scoremode's ``__init__`` calls it, because the packages that
define these classes are lower in the import order and cannot import this module.
"""

from __future__ import annotations

from scoremode.harness.results import TasksComparison
from scoremode.report.html.summary import measure_cell, size_cell
from scoremode.report.html.templating import cell_with_error, fill
from scoremode.report.numbers import RUN_MEASURES, SHOWN
from scoremode.report.served import served
from scoremode.report.terminal.comparison_tables import shown_rows
from scoremode.report.text import NOT_MEASURED
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import NEEDS, Run
from scoremode.values import Estimate

PROVENANCE = {"model": "Model", "engine": "Engine", "dtype": "Dtype", "corpus": "Text", "method": "Method"}


def install() -> None:
    """Give Run, Comparison and TasksComparison the method that notebooks call."""
    setattr(Run, "_repr_html_", run_html)  # noqa: B010 - a type checker would not let us add a method
    setattr(Comparison, "_repr_html_", comparison_html)  # noqa: B010
    setattr(TasksComparison, "_repr_html_", tasks_html)  # noqa: B010


def run_html(run: Run) -> str:
    """The numbers of a run, then their provenance."""
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


def tasks_html(comparison: TasksComparison) -> str:
    """Recovery and flips of every row."""
    rows = []
    for row in shown_rows(comparison):
        said = cell_with_error(row["recovery"], row["recovery_stderr"], percent=True)
        if row["lost_documents"] is not None:
            said += f", {row['lost_documents']:,} lost, {row['gained_documents']:,} gained"
        rows.append((f"{row['name']}, {row['metric']}", said))
    caption = f"{comparison.name}: recovery of {comparison.baseline_name}"
    return str(fill("notebook.html", caption=caption, rows=rows))


def comparison_html(comparison: Comparison) -> str:
    """The candidate's numbers against the baseline's."""
    statistics, its = comparison.statistics(), served(comparison)
    baseline = comparison.baseline.manifest.get("model", "the baseline")
    rows: list[tuple[str, str]] = [("Baseline perplexity", cell_with_error(statistics.get("ppl_baseline")))]
    rows += [(m.label, measure_cell(m, statistics)) for m in SHOWN if statistics.get(m.name) is not None]
    if not all(run.scores.has("top") for run in (comparison.baseline, comparison.candidate)):
        rows.append(("Same top", NOT_MEASURED))
    if statistics.get("noise_floor_kl_mean") is not None:
        rows.append(("Noise floor, KL mean", cell_with_error(statistics["noise_floor_kl_mean"])))
    if its.line:
        rows.append(("Served", its.line))
    if size := size_cell(its):
        rows.append(("Size" if its.bits_per_weight is None else "Bits/weight", size))
    rows.append(("Tokens", f"{len(comparison.groups):,}"))
    return str(fill("notebook.html", caption=f"{comparison.name} against {baseline}", rows=rows))
