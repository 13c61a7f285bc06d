"""The page of comparisons on tasks: a table, recovery with its bounds, and the documents that flipped.

Questions and choices come from untrusted files and are written through ``escaped``. The page needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from scoremode.harness.results import ALL, Flip, TasksComparison, softmax
from scoremode.report.html import charts
from scoremode.report.html.charts import escaped, visible
from scoremode.report.html.frame import frame
from scoremode.report.html.numbers import cell_with_error, written
from scoremode.report.html.provenance import commands_block, facts_list, manifest_facts
from scoremode.report.html.recovery import Line, Mark, recovery_chart
from scoremode.report.served import served_manifest
from scoremode.report.terminal.tasks import other_metrics, shown_rows
from scoremode.report.text import counted
from scoremode.verbs.outputs import check_report

FLIPS_SHOWN = 25  # documents of each task and candidate; a page with thousands would not open on a phone
LONGEST_QUESTION, LONGEST_CHOICE = 1500, 600  # characters; few-shot examples come first, so the end is shown
COLUMNS = (
    ("Documents", "documents of the task that were asked"),
    ("acc", "share of documents whose right answer is the likeliest"),
    ("acc_norm", "the same, with log-probabilities divided by the length of the answer"),
    ("Recovery", "the candidate's metric divided by the baseline's, with a paired error"),
    ("Lost", "right in the baseline, wrong in the candidate"),
    ("Gained", "wrong in the baseline, right in the candidate"),
    ("McNemar p", "exact: how likely so uneven flips are by chance"),
    ("Changed", "share of documents with another answer chosen, right or not"),
    ("Margin shift", "change of the right answer's lead over the best other, nats"),
    ("KL", "KL(baseline‖candidate) over the choices, nats"),
)

Row = Mapping[str, Any]


def render_tasks(found: Sequence[TasksComparison]) -> str:
    """The page of comparisons with one baseline on the same tasks."""
    title = visible(f"{_listed([c.name for c in found])} against {found[0].baseline_name} on tasks")
    body = "".join((_summary(found), _recovery(found), _flipped(found), _provenance(found)))
    sections = {"summary": "Summary", "recovery": "Recovery", "flips": "Flips", "provenance": "Provenance"}
    return frame(title, _lead(found), sections, body, skip=("flips", "the documents that flipped"))


def write_tasks(path: str | Path, found: Sequence[TasksComparison], *, flag: str = "-o") -> Path | str:
    """Write the page to a file, all of it or nothing; only an older report is replaced."""
    output = check_report(path, flag)
    output.write(render_tasks(found).encode())
    return output.where


def _listed(names: Sequence[str]) -> str:
    if len(names) > 3:
        return f"{len(names)} candidates"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _lead(found: Sequence[TasksComparison]) -> str:
    """The result in a sentence, as HTML."""
    best = max(found, key=lambda c: -math.inf if c.overall["recovery"] is None else c.overall["recovery"])
    r, first = best.overall, found[0]
    on = f"{counted(r['documents'], 'documents')} of {counted(len(first.tasks), 'tasks')}."
    if r["recovery"] is None:
        return escaped(f"Asked: {on}")
    number = cell_with_error(r["recovery"], r["recovery_stderr"], percent=True)
    who = f"<strong>{escaped(best.name)}</strong> recovers " if len(found) > 1 else "Recovery "
    flips = f"{counted(r['lost_documents'], 'documents')} lost, {r['gained_documents']:,} gained"
    said = f"{who}{number}" + (f"; {escaped(flips)}, p = {_p(r['mcnemar'])}" if r["mcnemar"] is not None else "")
    return f"{said}. {escaped(on)}"


# ── summary ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _summary(found: Sequence[TasksComparison]) -> str:
    shown = [c for c in COLUMNS if not c[0].startswith("acc_norm") or _has(found, "acc_norm_baseline")]
    head = "".join(
        f'<th scope="col"><abbr title="{escaped(about)}">{escaped(name)}</abbr></th>' for name, about in shown
    )
    bodies = []
    for i, c in enumerate(found):
        named = f"{charts.swatch(i)} {escaped(c.name)}"
        lines = [f'<tr class="group"><th colspan="{len(shown) + 1}" scope="rowgroup">{named}</th></tr>']
        lines += [_line(row, [name for name, _ in shown]) for row in shown_rows(c)]
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Summary table"><table class="summary">'
        f'<thead><tr><th scope="col">Task</th>{head}</tr></thead>{"".join(bodies)}</table></div>'
    )
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in _notes(found))
    title = '<h2 id="summary-title">Summary</h2>'
    return f'<section id="summary" aria-labelledby="summary-title">{title}{table}{notes}</section>\n'


def _has(found: Sequence[TasksComparison], name: str) -> bool:
    return any(row[name] is not None for c in found for row in c.rows)


def _notes(found: Sequence[TasksComparison]) -> list[str]:
    first = found[0]
    notes = [
        "± is one standard error over documents; that of recovery is paired. The tag names the metric of recovery."
    ]
    if len(first.top) > 1:
        notes.append(f"{ALL}: the mean over {', '.join(first.top)}, which count alike; lost and gained are sums.")
    notes += [f"{words}." for words in other_metrics(found)]
    return notes + [f"{note}." for note in dict.fromkeys(note for c in found for note in c.notes)]


def _line(r: Row, columns: Iterable[str]) -> str:
    cells = {
        "Documents": f"{r['documents']:,}",
        "acc": _accuracy(r, "acc") or _accuracy(r, "accuracy"),
        "acc_norm": _accuracy(r, "acc_norm") or "–",
        "Recovery": cell_with_error(r["recovery"], r["recovery_stderr"], percent=True),
        "Lost": _count(r["lost_documents"]),
        "Gained": _count(r["gained_documents"]),
        "McNemar p": _p(r["mcnemar"]),
        "Changed": cell_with_error(r["changed"], percent=True),
        "Margin shift": cell_with_error(r["margin_shift"], r["margin_shift_stderr"]),
        "KL": cell_with_error(r["kl_choices"], r["kl_choices_stderr"]),
    }
    name = escaped(r["name"]) if r["kind"] == "task" else f"<strong>{escaped(r['name'])}</strong>"
    tag = f'<span class="tag">{escaped(r["metric"])}</span>'
    rest = "".join(f'<td data-label="{escaped(column)}">{cells[column]}</td>' for column in columns)
    return f'<tr><th scope="row">{name} {tag}</th>{rest}</tr>'


def _accuracy(r: Row, name: str) -> str:
    if r[f"{name}_baseline"] is None:
        return ""
    value, error = written(r[f"{name}_candidate"], r[f"{name}_candidate_stderr"], percent=True)
    before = written(r[f"{name}_baseline"], r[f"{name}_baseline_stderr"], percent=True)[0]
    return f'{escaped(before)} → {escaped(value)} <span class="error">{escaped(error)}</span>'


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value >= 0.001 else escaped(f"{value:.1e}".replace("e-0", "e−").replace("e-", "e−"))


# ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _recovery(found: Sequence[TasksComparison]) -> str:
    first = shown_rows(found[0])
    lines = [Line(row["name"], row["kind"] != "task", tuple(_mark(c.row(row["name"])) for c in found)) for row in first]
    drawn = recovery_chart(lines, [c.name for c in found])
    if not drawn:
        return ""
    keys = "".join(f"<li>{charts.swatch(i)} {escaped(c.name)}</li>" for i, c in enumerate(found))
    legend = f'<ul class="legend">{keys}</ul>' if len(found) > 1 else ""
    return (
        '<section id="recovery" aria-labelledby="recovery-title"><h2 id="recovery-title">Recovery</h2>'
        f"{legend}{drawn}</section>\n"
    )


def _mark(row: Row) -> Mark:
    return Mark(row["recovery"], row["recovery_low"], row["recovery_high"])


# ── flips ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _flipped(found: Sequence[TasksComparison]) -> str:
    parts = []
    for i, c in enumerate(found):
        tasks = [list(flips) for _, flips in groupby(c.flips(), key=lambda flip: flip.task)]
        inside = [_task_flips(c, flips, opened=i == j == 0) for j, flips in enumerate(tasks)]
        said = "".join(inside) or '<p class="note">No document flipped.</p>'
        parts.append(f"<h3>{charts.swatch(i)} {escaped(c.name)}</h3>{said}")
    said = (
        "Probabilities are over the choices of a document and sum to 100%. ✓ marks the right answer; the answer that a "
        "model chose is bold: the likeliest, or with acc_norm the one with the most nats per character."
    )
    return (
        '<section id="flips" aria-labelledby="flips-title"><h2 id="flips-title">Documents that flipped</h2>'
        f'<p class="note">{escaped(said)}</p>{"".join(parts)}</section>\n'
    )


def _task_flips(c: TasksComparison, flips: Sequence[Flip], *, opened: bool) -> str:
    lost = sum(not flip.gained for flip in flips)
    title = f"{flips[0].task}: {lost:,} lost, {len(flips) - lost:,} gained"
    shown = "".join(_flip(c, flip) for flip in islice(flips, FLIPS_SHOWN))
    more = len(flips) - FLIPS_SHOWN
    rest = f'<p class="note">{more:,} more are not shown here; --json lists all.</p>' if more > 0 else ""
    return f"<details{' open' if opened else ''}><summary>{escaped(title)}</summary>{shown}{rest}</details>"


def _flip(c: TasksComparison, flip: Flip) -> str:
    kind, word = ("best", "gained: wrong → right") if flip.gained else ("worst", "lost: right → wrong")
    context = "" if flip.document.contexts_differ else flip.document.pairs[0][0]
    question = f'<p class="question">{escaped(_end(context, LONGEST_QUESTION))}</p>' if context else ""
    head = (
        f'<tr><th scope="col">Choice</th><th scope="col">{escaped(c.baseline_name)}</th>'
        f'<th scope="col">{escaped(c.name)}</th></tr>'
    )
    rows = "".join(_choice_row(flip, i) for i in range(len(flip.baseline)))
    return (
        f'<article class="flip"><p><span class="key {kind}">{escaped(word)}</span> '
        f'<span class="error">document {flip.document.number:,}</span></p>{question}'
        f'<div class="scroll"><table class="choices"><thead>{head}</thead><tbody>{rows}</tbody></table></div></article>'
    )


def _choice_row(flip: Flip, i: int) -> str:
    document = flip.document
    text = document.choices[i] if document.choices else document.pairs[0][1]
    whole = text + document.pairs[i][1] if document.contexts_differ else text
    right = i in (document.gold or ())
    mark = '<span aria-label="right">✓</span> ' if right else ""
    cells = ""
    for side, chosen in ((flip.baseline, flip.chosen[0]), (flip.candidate, flip.chosen[1])):
        alone = f'<span class="error">{_nats(side[i], text if flip.per_character else "")}</span>'
        share = softmax(side)[i]
        number = f"{100 * share:.1f}% " if document.choices and math.isfinite(share) else ""
        strong = f"<strong>{number}</strong>" if chosen == i else number
        cells += f"<td>{strong}{alone}</td>"
    kind = ' class="right"' if right else ""
    return f'<tr{kind}><th scope="row">{mark}{escaped(_beginning(whole, LONGEST_CHOICE))}</th>{cells}</tr>'


def _nats(log_prob: float, text: str) -> str:
    """A log-probability, and that per character of a text."""
    if not math.isfinite(log_prob):
        return "probability 0"
    each = f", {log_prob / len(text):.3f} per character" if text else ""
    return escaped(f"{log_prob:.3f} nats{each}".replace("-", "−"))


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[-most:]


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


# ── provenance ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _provenance(found: Sequence[TasksComparison]) -> str:
    first = found[0]
    sides = [("baseline", first.baseline), *((c.name, c.candidate) for c in found)]
    parts = [f"<h3>Tasks</h3>{facts_list(_task_facts(first))}"]
    for name, facts in sides:
        known = {"model": str(facts.get("model")), "model sha256": str(facts.get("model_fingerprint"))}
        known |= manifest_facts(facts, served_manifest(facts))
        parts.append(f"<details><summary>{escaped(name)}</summary>{facts_list(known)}</details>")
    return (
        '<section id="provenance" aria-labelledby="provenance-title"><h2 id="provenance-title">Provenance</h2>'
        f"{commands_block([c.manifest for c in found])}{''.join(parts)}</section>\n"
    )


def _task_facts(c: TasksComparison) -> dict[str, str]:
    s = c.settings
    facts = {
        "lm-eval": s["lm_eval"],
        "documents": "all" if s["limit"] is None else f"the first {s['limit']:,} of each task",
        "few-shot examples": ", ".join(f"{name} {count}" for name, count in s["num_fewshot"].items()),
        "versions of the tasks": ", ".join(f"{task.name} {task.version}" for task in c.tasks if task.version),
        "chat template": "applied" if s["apply_chat_template"] else "not applied",
        "seeds": ", ".join(f"{name} {seed}" for name, seed in s["seeds"].items()),
        "files": ", ".join(f"{name} (sha256 {sha256[:12]})" for name, sha256 in s["task_files"].items()),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}
