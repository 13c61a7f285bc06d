"""Comparisons on tasks for a model card: a Markdown table, and the Hugging Face hub's ``model-index``.

Names come from untrusted files and are escaped as in modelcard.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scoremode.errors import RunError
from scoremode.harness.results import TasksComparison
from scoremode.report.modelcard import NOTHING, cell, code, engine_words, escaped_markdown, plain_number, quoted
from scoremode.report.terminal.tasks import other_metrics, shown_rows

HEADER = ("task", "metric", "few-shot", "documents", "baseline", "candidate", "recovery", "lost", "gained", "p")


def tasks_markdown(found: Sequence[TasksComparison]) -> str:
    """A table per candidate, with one row per task, and below it how to reproduce the numbers."""
    parts = []
    for c in found:
        if len(found) > 1:
            parts.append(f"**{escaped_markdown(c.name)}**\n")
        header = [
            {"baseline": f"{escaped_markdown(c.baseline_name)} (baseline)", "candidate": escaped_markdown(c.name)}.get(
                title, title
            )
            for title in HEADER
        ]
        lines = [header, ["---" if title in ("task", "metric") else "---:" for title in HEADER], *_rows(c)]
        parts += ["\n".join(f"| {' | '.join(row)} |" for row in lines), ""]
    return "\n".join([*parts, _method(found)]) + "\n"


def _rows(c: TasksComparison) -> list[list[str]]:
    shots = {task.name: str(task.shots) for task in c.tasks}
    found = []
    for r in shown_rows(c):
        lost, gained = (NOTHING if r[n] is None else f"{r[n]:,}" for n in ("lost_documents", "gained_documents"))
        name = escaped_markdown(r["name"])
        cells = [
            name if r["kind"] == "task" else f"**{name}**",
            escaped_markdown(r["metric"]),
            shots.get(r["name"], NOTHING) if r["kind"] == "task" else NOTHING,
            f"{r['documents']:,}",
            cell(r, "accuracy_baseline", percent=True),
            cell(r, "accuracy_candidate", percent=True),
            cell(r, "recovery", percent=True),
            lost,
            gained,
            cell(r, "mcnemar"),
        ]
        found.append(cells)
    return found


def _method(found: Sequence[TasksComparison]) -> str:
    """One paragraph on one line: tasks, engines, what ± means, notes, commands."""
    first = found[0]
    engines = [(f"{first.baseline_name} (baseline)", engine_words(first.baseline))]
    engines += [(c.name, engine_words(c.candidate)) for c in found]
    if len({words for _, words in engines}) == 1:
        said = f"Engine: {escaped_markdown(engines[0][1])}."
    else:
        said = f"Engines: {'; '.join(f'{escaped_markdown(n)}: {escaped_markdown(w)}' for n, w in engines)}."
    parts = [
        f"Tasks of lm-eval {escaped_markdown(first.settings['lm_eval'])}, log-likelihoods, few-shot seed "
        f"{first.settings['seeds']['fewshot']}.",
        said,
        "± is one standard error over documents; recovery is candidate / baseline, with a paired error. Lost: right in "
        "the baseline, wrong in the candidate. p: exact McNemar.",
        *(f"{escaped_markdown(words)}." for words in other_metrics(found)),
        *(f"Note: {escaped_markdown(note)}." for note in dict.fromkeys(n for c in found for n in c.notes)),
    ]
    commands = dict.fromkeys(str(c.manifest["command"]) for c in found if c.manifest.get("command"))
    return " ".join([*parts, *([f"Command: {', '.join(map(code, commands))}"] if commands else [])])


def tasks_model_index(c: TasksComparison) -> str:
    """The ``model-index`` block of a model card's metadata, to paste between its two ``---`` lines."""
    lines = ["model-index:", f"  - name: {quoted(c.name)}", "    results:"]
    for task in c.tasks:
        metrics = list(_metrics(c, c.row(task.name)))
        if not metrics:
            continue
        lines += [
            "      - task:",
            "          type: text-generation",
            "        dataset:",
            f"          type: {quoted(task.name)}",
            f"          name: {quoted(f'{task.name}, {task.shots}-shot, {task.paired.documents:,} documents')}",
            "        metrics:",
        ]
        for kind, label, value in metrics:
            lines += [
                f"          - type: {kind}",
                f"            name: {quoted(label)}",
                f"            value: {plain_number(value)}",
            ]
    if len(lines) == 3:
        raise RunError(f"{c.name} has no metric that the hub could show", fix="ask more documents")
    return "\n".join(lines) + "\n"


def _metrics(c: TasksComparison, row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    known = (
        ("acc", "accuracy", row["acc_candidate"]),
        ("acc_norm", "accuracy, normalised by length", row["acc_norm_candidate"]),
        ("recovery", f"{row['metric']} divided by that of {c.baseline_name}", row["recovery"]),
    )
    return [(kind, label, value) for kind, label, value in known if value is not None]
