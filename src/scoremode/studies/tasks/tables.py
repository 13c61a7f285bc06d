"""Comparisons on tasks as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from scoremode.core.statistics.groups import FEWEST
from scoremode.reports.served import served_manifest
from scoremode.reports.terminal.comparison_tables import above_error
from scoremode.reports.terminal.console import BlockTable, TableColumn
from scoremode.reports.text import counted, shown
from scoremode.studies.tasks.results import Flip, TasksComparison
from scoremode.values import rounded

Row = Mapping[str, Any]


def shown_rows(comparison: TasksComparison) -> list[dict[str, Any]]:
    """The rows of a table; the row over all tasks is left out if it would repeat that of a single task or group."""
    return comparison.rows if len(comparison.top) > 1 or not comparison.rows[:-1] else comparison.rows[:-1]


def other_metrics(found: Sequence[TasksComparison]) -> list[str]:
    """lm-eval's metrics that are not means over documents, as in ``lambada_openai: perplexity 5.02, of q4 5.31``."""
    lines = []
    for task in found[0].tasks:
        for metric in task.paired.lm_eval.keys() - task.paired.metrics.keys():
            pairs = [next(t for t in c.tasks if t.name == task.name).paired.lm_eval[metric] for c in found]
            others = ", ".join(f"of {c.name} {cand:.4g}" for c, (_, cand) in zip(found, pairs, strict=True))
            lines.append(f"{task.name}: {metric} {pairs[0][0]:.4g}, {others}")
    return sorted(lines)


def tasks_json(found: Sequence[TasksComparison]) -> dict[str, Any]:
    first = found[0]
    return {
        "baseline": first.baseline_name,
        "baseline_served": served_manifest(first.baseline).as_json(),
        "settings": dict(first.settings),
        "candidates": [
            {
                "name": c.name,
                **served_manifest(c.candidate).as_json(),
                "notes": list(c.notes),
                "rows": c.rows,
                "weights": c.weights,
                "lm_eval": {task.name: _printed_by_lm_eval(task.paired.lm_eval) for task in c.tasks},
                "flipped": [_flip_json(flip) for flip in c.flips()],
            }
            for c in found
        ],
    }


def _printed_by_lm_eval(values: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    finite = {name: pair for name, pair in values.items() if all(abs(v) < float("inf") for v in pair)}
    return {name: {"baseline": base, "candidate": cand} for name, (base, cand) in finite.items()}


def _flip_json(flip: Flip) -> dict[str, Any]:
    return {
        "task": flip.task,
        "document": flip.document.number,
        "gained": flip.gained,
        "gold": list(flip.document.gold or ()),
        "baseline_chose": flip.chosen[0],
        "candidate_chose": flip.chosen[1],
    }


def tasks_tables(found: Sequence[TasksComparison]) -> list[Any]:
    """One table per candidate, then what a reader must know."""
    parts: list[Any] = []
    for comparison in found:
        title = f"{comparison.name} against {comparison.baseline_name}"
        parts += [Text(shown(title), "bold"), _table(shown_rows(comparison)), ""]
    notes = dict.fromkeys(note for comparison in found for note in comparison.notes)
    parts += [Text(shown(note), "yellow") for note in notes]
    parts += [Text(shown(line)) for line in other_metrics(found)]
    return [*parts, *(Text(shown(line), "dim") for line in _method(found))]


def _table(rows: Sequence[Row]) -> BlockTable:
    common = all(part in ("acc", "acc_norm") for r in rows for part in r["metric"].split(" / "))
    columns = [
        TableColumn("documents", [f"{r['documents']:,}" for r in rows]),
        *(
            TableColumn(f"{name}, %", [_accuracy(r, name) for r in rows])
            for name in ("acc", "acc_norm", *(() if common else ("accuracy",)))
            if any(r[f"{name}_baseline"] is not None for r in rows)
        ),
        TableColumn("recovery", [_recovery(r) for r in rows]),
        TableColumn("of", [r["metric"] for r in rows], number=False),
        TableColumn("lost", [_count(r["lost_documents"]) for r in rows]),
        TableColumn("gained", [_count(r["gained_documents"]) for r in rows]),
        TableColumn("p", ["-" if r["mcnemar"] is None else f"{r['mcnemar']:.2g}" for r in rows]),
        TableColumn("margin", [above_error(r, "margin_shift", sign="+") for r in rows]),
        TableColumn("KL", [above_error(r, "kl_choices") for r in rows]),
    ]
    return BlockTable([shown(str(r["name"])) for r in rows], columns)


def _accuracy(r: Row, name: str) -> str:
    """The baseline's and the candidate's share above the candidate's error, in percent without its sign."""
    if r[f"{name}_baseline"] is None:
        return "-"
    error = r[f"{name}_candidate_stderr"]
    before, after = (
        rounded(r[f"{name}_{side}"], supports=error, percent=True)[0] for side in ("baseline", "candidate")
    )
    said = rounded(r[f"{name}_candidate"], error, percent=True)[1]
    return f"{before} → {after}\n{said}".replace("%", "").rstrip()


def _recovery(row: Row) -> str:
    if row["recovery"] is None and row["accuracy_baseline"] == 0:
        return "undefined"
    return above_error(row, "recovery", percent=True)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _method(found: Sequence[TasksComparison]) -> list[str]:
    """How the tasks were measured, in a few lines."""
    first = found[0]
    documents = first.overall["documents"]
    shots = {task.shots for task in first.tasks}
    said = "an unknown number of" if None in shots else " or ".join(str(n) for n in sorted(n or 0 for n in shots))
    error = (
        "± is one standard error over documents; recovery's is paired"
        if documents >= FEWEST
        else f"too few documents for an error ({documents}, {FEWEST} are needed)"
    )
    lines = [
        f"lm-eval {first.settings['lm_eval']}, {counted(documents, 'documents')}, {said} few-shot examples; {error}",
        "lost: right in the baseline, wrong in the candidate; p: exact McNemar; margin: shift of the right answer's "
        "lead in nats; KL: over the choices, in nats",
    ]
    if len(first.top) > 1:
        lines.append(f"all: the mean over {', '.join(first.top)}, which count alike; lost and gained are sums")
    return lines
