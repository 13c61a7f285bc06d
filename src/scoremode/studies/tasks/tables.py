"""Comparisons on tasks: the table of each candidate, notes, JSON, and what a model card has of them."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from scoremode.core.statistics.groups import FEWEST
from scoremode.errors import RunError
from scoremode.reports.model_card import engine_words, fill_card, markdown_table, public_commands
from scoremode.reports.served import served_manifest
from scoremode.reports.table import (
    NOTHING,
    Block,
    Cell,
    Column,
    Fields,
    Note,
    Row,
    Table,
    count,
    counts,
    number,
    numbers,
    words,
)
from scoremode.reports.text import counted
from scoremode.studies.tasks.results import Flip, TasksComparison
from scoremode.values import rounded


def tasks_table(comparisons: Sequence[TasksComparison], title: str = "") -> Table:
    """One row per task and candidate; several candidates are groups of the table.

    The row over all tasks is left out if it would repeat that of a single task or group.
    """
    pairs = [(c, r) for c in comparisons for r in c.rows if r is not c.overall or len(c.top) > 1 or len(c.rows) == 1]
    rows = [r for _, r in pairs]
    common = all(part in ("acc", "acc_norm") for r in rows for part in r["metric"].split(" / "))
    names = ("acc", "acc_norm", *(() if common else ("accuracy",)))
    measures = [name for name in names if any(r[f"{name}_baseline"] is not None for r in rows)]
    about = {
        "acc": "share of documents whose right answer is the likeliest: baseline → candidate",
        "acc_norm": "the same, with log-probabilities divided by the length of the answer",
    }
    shots = [count(c.settings["num_fewshot"].get(r["name"])) for c, r in pairs]
    card = {
        f"{comparisons[0].baseline_name} (baseline)": "accuracy_baseline",
        comparisons[0].name: "accuracy_candidate",
    }
    p = [Cell(NOTHING if r["mcnemar"] is None else f"{r['mcnemar']:.2g}") for r in rows]
    columns = [
        Column("", shots, page="", card="few-shot"),
        counts("documents", rows, "documents", card="documents"),
        *(numbers("", rows, name, percent=True, page="", card=title) for title, name in card.items()),
        *(
            Column(f"{name}, %", [_accuracy(r, name) for r in rows], page=f"{name}, %", about=about.get(name, ""))
            for name in measures
        ),
        Column("recovery", [_recovery(r) for r in rows], card="recovery", about="candidate divided by baseline"),
        words("of", [r["metric"] for r in rows], page=""),
        counts("lost", rows, "lost_documents", card="lost", about="right in the baseline, wrong in the candidate"),
        counts("gained", rows, "gained_documents", card="gained", about="wrong in the baseline, now right"),
        Column("p", p, page="McNemar p", card="p", about="exact: how likely so uneven flips are by chance"),
        numbers("", rows, "changed", percent=True, page="Changed", about="documents with another answer, right or not"),
        numbers("margin", rows, "margin_shift", sign="+", about="change of the right answer's lead, nats"),
        numbers("KL", rows, "kl_choices", about="KL(baseline‖candidate) over the choices, nats"),
    ]
    several = len(comparisons) > 1
    lines = [Row(r["name"], r["metric"], strong=r["kind"] != "task", group=c.name if several else "") for c, r in pairs]
    return Table(lines, columns, title, corner="task")


def _accuracy(r: Fields, name: str) -> Cell:
    """The baseline's and the candidate's share, and the candidate's error, in percent without its sign."""
    if r[f"{name}_baseline"] is None:
        return Cell(NOTHING)
    error, sides = r[f"{name}_candidate_stderr"], (r[f"{name}_{side}"] for side in ("baseline", "candidate"))
    before, after = (rounded(value, supports=error, percent=True)[0] for value in sides)
    error_text = rounded(r[f"{name}_candidate"], error, percent=True)[1]
    return Cell(f"{before} → {after}".replace("%", ""), error_text.replace("%", ""))


def _recovery(r: Fields) -> Cell:
    if r["recovery"] is None and r["accuracy_baseline"] == 0:
        return Cell("undefined")
    return number(r["recovery"], r["recovery_stderr"], percent=True)


def tasks_blocks(comparisons: Sequence[TasksComparison]) -> list[Block]:
    tables = [part for c in comparisons for part in (tasks_table([c], f"{c.name} against {c.baseline_name}"), "")]
    return [*tables, *tasks_notes(comparisons)]


def tasks_notes(comparisons: Sequence[TasksComparison]) -> list[Note]:
    """What stands below the tables: notes on logs and models, and what the columns are."""
    first = comparisons[0]
    documents = first.overall["documents"]
    shots = {task.shots for task in first.tasks}
    amount = "an unknown number of" if None in shots else " or ".join(str(n) for n in sorted(n or 0 for n in shots))
    error = "± is one standard error over documents; recovery's is paired"
    error = error if documents >= FEWEST else f"too few documents for an error ({documents}, {FEWEST} are needed)"
    lines = [
        f"lm-eval {first.settings['lm_eval']}, {counted(documents, 'documents')}, {amount} few-shot examples; {error}",
        "lost: right in the baseline, wrong in the candidate; p: exact McNemar; margin: shift of the right answer's "
        "lead in nats; KL: over the choices, in nats",
    ]
    if len(first.top) > 1:
        lines.append(f"all: the mean over {', '.join(first.top)}, which count alike; lost and gained are sums")
    notes = dict.fromkeys(note for c in comparisons for note in c.notes)
    return [*(Note(note, "yellow") for note in notes), *(Note(line, "dim") for line in lines)]


def tasks_json(comparisons: Sequence[TasksComparison]) -> dict[str, object]:
    first = comparisons[0]
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
                "flipped": [_flip_json(flip) for flip in c.flips()],
            }
            for c in comparisons
        ],
    }


def _flip_json(flip: Flip) -> dict[str, object]:
    return {
        "task": flip.task,
        "document": flip.document.number,
        "gained": flip.gained,
        "gold": list(flip.document.gold or ()),
        "baseline_chose": flip.chosen[0],
        "candidate_chose": flip.chosen[1],
    }


# ── for model cards ──────────────────────────────────────────────────────────────────────────────────────────────────
def tasks_markdown(comparisons: Sequence[TasksComparison]) -> str:
    """A table per candidate, with one row per task, and below it how to reproduce the numbers."""
    first = comparisons[0]
    return fill_card(
        "tasks_card.md",
        found=comparisons,
        tables=[Markup(markdown_table(tasks_table([c]))) for c in comparisons],
        served_by=engine_words(
            {f"{first.baseline_name} (baseline)": first.baseline, **{c.name: c.candidate for c in comparisons}}
        ),
        notes=[note.text for note in tasks_notes(comparisons) if note.style == "yellow"],
        commands=public_commands(comparisons),
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
        if entries := [metric for metric in metrics if metric[2] is not None]:
            shots = "" if task.shots is None else f"{task.shots}-shot, "
            results.append((task.name, f"{task.name}, {shots}{task.count:,} documents", entries))
    if not results:
        raise RunError(f"{c.name} has no metric that the hub could show", fix="run lm-eval on more documents")
    return fill_card("model_index.yaml", name=c.name, results=results)
