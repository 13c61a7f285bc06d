"""Comparisons on tasks as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from scoremode.harness.results import Flip, TasksComparison
from scoremode.report.served import served_manifest
from scoremode.report.terminal.blocks import BlockTable, Column
from scoremode.report.text import counted, shown
from scoremode.statistics.groups import FEWEST

Row = Mapping[str, Any]


def shown_rows(comparison: TasksComparison) -> list[dict[str, Any]]:
    """The rows of a table; the one over all is left out if it would repeat the only one before it."""
    return comparison.rows if len(comparison.top) > 1 or not comparison.rows[:-1] else comparison.rows[:-1]


def tasks_json(found: Sequence[TasksComparison]) -> dict[str, Any]:
    """What ``--json`` prints."""
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


def other_metrics(found: Sequence[TasksComparison]) -> list[str]:
    """What lm-eval prints besides means over documents, as in ``lambada_openai: perplexity 5.02, of q4 5.31``."""
    lines = []
    for task in found[0].tasks:
        for metric in task.paired.lm_eval.keys() - task.paired.metrics.keys():
            pairs = [next(t for t in c.tasks if t.name == task.name).paired.lm_eval[metric] for c in found]
            others = ", ".join(f"of {c.name} {cand:.4g}" for c, (_, cand) in zip(found, pairs, strict=True))
            lines.append(f"{task.name}: {metric} {pairs[0][0]:.4g}, {others}")
    return sorted(lines)


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
    columns = [
        Column("documents", [f"{r['documents']:,}" for r in rows]),
        *_accuracies(rows, "acc"),
        *_accuracies(rows, "acc_norm"),
        *([] if _in_common_metrics(rows) else _accuracies(rows, "accuracy")),
        Column("recovery", [recovery_words(r) for r in rows]),
        Column("of", [r["metric"] for r in rows], number=False),
        Column("lost", [_count(r["lost_documents"]) for r in rows]),
        Column("gained", [_count(r["gained_documents"]) for r in rows]),
        Column("p", [_number(r["mcnemar"], 3) for r in rows]),
        Column("margin", [_signed(r["margin_shift"], r["margin_shift_stderr"]) for r in rows]),
        Column("KL", [_number(r["kl_choices"], 4) for r in rows]),
    ]
    return BlockTable([shown(str(r["name"])) for r in rows], columns)


def _in_common_metrics(rows: Sequence[Row]) -> bool:
    return all(part in ("acc", "acc_norm") for r in rows for part in r["metric"].split(" / "))


def _accuracies(rows: Sequence[Row], name: str) -> list[Column]:
    if all(r[f"{name}_baseline"] is None for r in rows):
        return []
    cells = [
        f"{_percent(r[f'{name}_baseline'])} → {_percent(r[f'{name}_candidate'])}{_error(r[f'{name}_candidate_stderr'])}"
        if r[f"{name}_baseline"] is not None
        else "-"
        for r in rows
    ]
    return [Column(f"{name}, %", cells)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {100 * value:.2f}"


def recovery_words(row: Row) -> str:
    """Recovery in percent with its paired error."""
    value, error = row["recovery"], row["recovery_stderr"]
    if value is None:
        return "undefined" if row["accuracy_baseline"] == 0 else "-"
    return f"{100 * value:.2f}%" + ("" if error is None else f" ± {100 * error:.2f}")


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value == 0 or value >= 10.0**-digits else f"{value:.1e}"


def _signed(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}" + ("" if error is None else f" ± {error:.3f}")


def _method(found: Sequence[TasksComparison]) -> list[str]:
    """How it was measured, in a few lines."""
    first = found[0]
    documents = first.overall["documents"]
    shots = sorted({task.shots for task in first.tasks})
    said = " or ".join(map(str, shots))
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
