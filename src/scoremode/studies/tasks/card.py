"""Comparisons on tasks for a model card: Markdown tables, and the hub's ``model-index``."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from scoremode.errors import RunError
from scoremode.reports.model_card import engine_words, fill_card, markdown_table, public_commands
from scoremode.studies.tasks.results import TasksComparison
from scoremode.studies.tasks.tables import tasks_notes, tasks_table


def tasks_markdown(found: Sequence[TasksComparison]) -> str:
    """A table per candidate, with one row per task, and below it how to reproduce the numbers."""
    first = found[0]
    return fill_card(
        "tasks_card.md",
        found=found,
        tables=[Markup(markdown_table(tasks_table([c]))) for c in found],
        served_by=engine_words(
            {f"{first.baseline_name} (baseline)": first.baseline, **{c.name: c.candidate for c in found}}
        ),
        notes=[note.text for note in tasks_notes(found)],
        commands=public_commands(found),
    )


def tasks_model_index(c: TasksComparison) -> str:
    """The ``model-index`` block of a model card's metadata, to paste between its two ``---`` lines."""
    results = []
    for task in c.tasks:
        row = c.row(task.name)
        metrics = (
            ("acc", "accuracy", row["acc_candidate"]),
            ("acc_norm", "accuracy, normalised by length", row["acc_norm_candidate"]),
            ("recovery", f"{row['metric']} divided by that of {c.baseline_name}", row["recovery"]),
        )
        if known := [metric for metric in metrics if metric[2] is not None]:
            shots = "" if task.shots is None else f"{task.shots}-shot, "
            results.append((task.name, f"{task.name}, {shots}{task.count:,} documents", known))
    if not results:
        raise RunError(f"{c.name} has no metric that the hub could show", fix="run lm-eval on more documents")
    return fill_card("model_index.yaml", name=c.name, results=results)
