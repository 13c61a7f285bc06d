"""Small HTML tables for notebooks, which show the last value of a cell. All text in them is escaped.

``install`` adds ``_repr_html_`` to runs and comparisons. scoremode's ``__init__`` calls it, because the packages that
define these classes are lower in the import order and cannot import this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scoremode.harness.results import TasksComparison
from scoremode.report.html.charts import escaped
from scoremode.report.html.numbers import cell_with_error
from scoremode.report.html.tables import MEASURES, RUN_MEASURES, size_cell
from scoremode.report.served import served
from scoremode.report.terminal.tasks import shown_rows
from scoremode.report.text import NOT_MEASURED
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import NEEDS, Run
from scoremode.values import Estimate


def install() -> None:
    """Give Run and Comparison the method that notebooks call."""
    setattr(Run, "_repr_html_", run_html)  # noqa: B010 - a type checker would not let us add a method
    setattr(Comparison, "_repr_html_", comparison_html)  # noqa: B010
    setattr(TasksComparison, "_repr_html_", tasks_html)  # noqa: B010


def run_html(run: Run) -> str:
    """What ``Run._repr_html_`` shows: its numbers, then their provenance."""
    m = run.manifest
    metrics = m.get("metrics", {})
    rows: list[tuple[str, str]] = []
    for name, label, percent in RUN_MEASURES:
        if stored := metrics.get(name):
            estimate = Estimate.from_json(stored)
            rows.append((label, cell_with_error(estimate.value, estimate.stderr, percent=percent)))
        elif name in NEEDS:
            rows.append((label, NOT_MEASURED))
    rows.append(("Tokens", f"{len(run.scores):,}"))
    rows += _named(
        m, (("model", "Model"), ("engine", "Engine"), ("dtype", "Dtype"), ("corpus", "Text"), ("method", "Method"))
    )
    return _html_table("scoremode run", rows)


def tasks_html(comparison: TasksComparison) -> str:
    """What ``TasksComparison._repr_html_`` shows: recovery and flips of every row."""
    rows = []
    for row in shown_rows(comparison):
        said = cell_with_error(row["recovery"], row["recovery_stderr"], percent=True)
        if row["lost_documents"] is not None:
            said += escaped(f", {row['lost_documents']:,} lost, {row['gained_documents']:,} gained")
        rows.append((f"{row['name']}, {row['metric']}", said))
    return _html_table(f"{comparison.name}: recovery of {comparison.baseline_name}", rows)


def comparison_html(comparison: Comparison) -> str:
    """What ``Comparison._repr_html_`` shows: the candidate's numbers against the baseline's."""
    statistics = comparison.statistics()
    baseline = comparison.baseline.manifest.get("model", "the baseline")
    rows = [("Baseline perplexity", cell_with_error(statistics.get("ppl_baseline")))]
    rows += [(m.label, m.cell(statistics)) for m in MEASURES if statistics.get(m.name) is not None]
    if not all(run.scores.has("top") for run in (comparison.baseline, comparison.candidate)):
        rows.append(("Same top", NOT_MEASURED))
    if statistics.get("noise_floor_kl_mean") is not None:
        rows.append(("Noise floor, KL mean", cell_with_error(statistics["noise_floor_kl_mean"])))
    its = served(comparison)
    if its.line:
        rows.append(("Served", escaped(its.line)))
    if size := size_cell(its):
        rows.append(("Size" if its.bits_per_weight is None else "Bits/weight", size))
    rows.append(("Tokens", f"{len(comparison.groups):,}"))
    return _html_table(f"{comparison.name} against {baseline}", rows)


def _named(manifest: Any, names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(label, escaped(manifest[name])) for name, label in names if manifest.get(name) is not None]


def _html_table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    """Labels and cells; the cells are already HTML."""
    lines = "".join(
        f'<tr><th scope="row" style="text-align:left">{escaped(label)}</th>'
        f'<td style="text-align:right">{cell}</td></tr>'
        for label, cell in rows
    )
    return f'<table><caption style="text-align:left">{escaped(caption)}</caption><tbody>{lines}</tbody></table>'
