"""Comparisons of models, on texts and on tasks, as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from scoremode.report.numbers import SHOWN
from scoremode.report.served import ServedModel, in_groups, served, served_manifest
from scoremode.report.terminal.console import BlockTable, TableColumn
from scoremode.report.text import (
    NOT_MEASURED,
    counted,
    middle_cut,
    model_notes,
    noise_words,
    other_metrics,
    shown,
    shown_rows,
    top_words,
)
from scoremode.statistics.comparison import Comparison, Statistic, TerminalColumn
from scoremode.statistics.gate import too_few
from scoremode.statistics.groups import FEWEST
from scoremode.statistics.llamacpp import llamacpp_statistics, llamacpp_text
from scoremode.statistics.ranking import pairs_tested, rank

if TYPE_CHECKING:
    from scoremode.harness.results import Flip, TasksComparison

Row = Mapping[str, Any]

NARROW = NOT_MEASURED.replace(" ", "\n")  # no wider than its column's title, to leave room for the other columns
LONGEST_KIND = 26  # of a format or an engine


def comparison_json(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ``--json`` prints."""
    baseline = found[0].baseline
    return {
        "baseline": baseline.manifest["model"],
        "baseline_served": served_manifest(baseline.manifest).as_json(),
        "method": baseline.manifest["method"],
        "plan_digest": baseline.plan_digest,
        "baseline_notes": model_notes(baseline),
        "candidates": [
            {
                **s,
                **served(c).as_json(),
                "noise_floor_perturbed": c.noise_perturbed if c.noise_kl is not None else None,
                **({"kl_missing": c.manifest["kl_missing"]} if c.manifest.get("kl_missing") else {}),
            }
            for c, s in zip(found, statistics, strict=True)
        ],
    }


def llamacpp_layout(found: Sequence[Comparison]) -> str:
    """What ``--llamacpp`` prints: for each candidate the lines of llama.cpp's own tool."""
    texts = [llamacpp_text(llamacpp_statistics(c)).rstrip("\n") for c in found]
    if len(found) == 1:
        return texts[0]
    return "\n\n".join(f"{shown(c.name)}\n\n{text}" for c, text in zip(found, texts, strict=True))


def comparison_table(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> list[Any]:
    """The table, the noise floor, and which candidates cannot be told apart."""
    baseline, facts = found[0].baseline, [served(c) for c in found]
    order = [i for members in in_groups(facts).values() for i in members]
    rows = [statistics[i] for i in order]
    names = [shown(name) for name in (baseline.manifest["model"], *(s["name"] for s in rows))]
    columns = []
    for statistic in SHOWN:
        if (column := statistic.column) is not None:
            own = _number(statistics[0]["ppl_baseline"], 4) if statistic.name == "ppl_candidate" else "-"
            columns.append(TableColumn(column.title, [own, *(_cell(statistic, column, s) for s in rows)]))
    columns.append(TableColumn("over", ["-", *(f"{s['groups']:,}" for s in rows)]))
    kinds = _kinds([served_manifest(baseline.manifest), *(facts[i] for i in order)])
    return [
        BlockTable(names, [*kinds, *columns]),
        "",
        *_notes(found, statistics),
        _method_line(baseline.manifest, statistics[0]),
    ]


def _kinds(facts: Sequence[ServedModel]) -> list[TableColumn]:
    """Format, engine and bits per weight, if there are several formats or engines in the table."""
    formats, engines = [shown(f.format) for f in facts], [shown(f.engine) for f in facts]
    if len(set(formats)) == len(set(engines)) == 1:
        return []
    found = [
        TableColumn(title, [middle_cut(cell, LONGEST_KIND) or "-" for cell in cells], number=False)
        for title, cells in (("format", formats), ("engine", engines))
        if len(set(cells)) > 1
    ]
    if any(f.bits_per_weight is not None for f in facts):
        found.append(
            TableColumn("bits", ["-" if f.bits_per_weight is None else f"{f.bits_per_weight:.2f}" for f in facts])
        )
    return found


def _method_line(m: Any, s: dict[str, Any]) -> Text:
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in m["method_settings"].items())
    kind = m["stderr_groups"]
    rests_on = f"± over {s['groups']:,} {kind}" if s["worse_stderr"] is not None else too_few(s["groups"], kind)
    return Text(shown(f"{m['method']} ({settings}), {counted(s['targets'], 'targets')}, {rests_on}"), "dim")


def _notes(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> list[Text]:
    said = noise_words(found[0], statistics[0])
    notes = [Text(shown(said))] if said else []
    for run in dict.fromkeys([found[0].baseline, *(c.candidate for c in found)]):
        notes += [Text(shown(f"{run.manifest['model']}: {note}"), "yellow") for note in model_notes(run)]
    missing = {str(why): None for c in found if (why := c.manifest.get("kl_missing"))}
    notes += [Text(shown(why)) for why in missing]
    notes += [Text(shown(why)) for why in dict.fromkeys(map(top_words, found)) if why]
    if not any(c.kl is None for c in found) and len(found) > 1:
        for entry in rank(list(found)):
            if entry.tied_with:
                others = ", ".join(entry.tied_with)
                notes.append(Text(shown(f"{entry.name} cannot be told apart from {others}"), "yellow"))
        notes += [Text(words, "dim") for words in [pairs_tested(len(found))] if words]
    return notes


def _cell(statistic: Statistic, column: TerminalColumn, s: Mapping[str, Any]) -> str:
    value, error = s[statistic.name], s.get(f"{statistic.name}_stderr")
    if value is None:
        return NARROW if statistic.needs == "top" else "-"
    if statistic.percent:
        return f"{100 * value:.{column.digits}f}%"
    number = _number(value, column.digits)
    return f"{number} ± {error:.{column.digits}f}" if column.with_error and error is not None else number


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        TableColumn("recovery", [recovery_words(r) for r in rows]),
        TableColumn("of", [r["metric"] for r in rows], number=False),
        TableColumn("lost", [_number(r["lost_documents"], 0) for r in rows]),
        TableColumn("gained", [_number(r["gained_documents"], 0) for r in rows]),
        TableColumn("p", [_small(r["mcnemar"], 3) for r in rows]),
        TableColumn("margin", [_signed(r["margin_shift"], r["margin_shift_stderr"]) for r in rows]),
        TableColumn("KL", [_small(r["kl_choices"], 4) for r in rows]),
    ]
    return BlockTable([shown(str(r["name"])) for r in rows], columns)


def _accuracy(r: Row, name: str) -> str:
    before, after, error = (r[f"{name}_{side}"] for side in ("baseline", "candidate", "candidate_stderr"))
    if before is None:
        return "-"
    shown_after = "-" if after is None else f"{100 * after:.2f}"
    return f"{100 * before:.2f} → {shown_after}" + ("" if error is None else f" ± {100 * error:.2f}")


def recovery_words(row: Row) -> str:
    """Recovery in percent with its paired error."""
    value, error = row["recovery"], row["recovery_stderr"]
    if value is None:
        return "undefined" if row["accuracy_baseline"] == 0 else "-"
    return f"{100 * value:.2f}%" + ("" if error is None else f" ± {100 * error:.2f}")


def _small(value: float | None, digits: int) -> str:
    """A number with ``digits`` decimals, or with an exponent if all of these would be zeros."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value == 0 or value >= 10.0**-digits else f"{value:.1e}"


def _signed(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}" + ("" if error is None else f" ± {error:.3f}")


def _method(found: Sequence[TasksComparison]) -> list[str]:
    """How the tasks were measured, in a few lines."""
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
