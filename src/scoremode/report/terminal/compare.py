"""Comparisons as a table for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from scoremode.report.served import Served, in_groups, served, served_run
from scoremode.report.terminal.blocks import BlockTable, Column
from scoremode.report.text import NOT_MEASURED, counted, middle_cut, model_notes, noise_words, shown, top_words
from scoremode.statistics.comparison import STATISTICS, Comparison, Statistic, TerminalColumn
from scoremode.statistics.gate import too_few
from scoremode.statistics.llamacpp import llamacpp_statistics, llamacpp_text
from scoremode.statistics.ranking import pairs_tested, rank

NARROW = NOT_MEASURED.replace(" ", "\n")  # no wider than its column's title, to leave room for the other columns
LONGEST_KIND = 26  # of a format or an engine


def comparison_json(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ``--json`` prints."""
    baseline = found[0].baseline
    return {
        "baseline": baseline.manifest["model"],
        "baseline_served": served_run(baseline).as_json(),
        "method": baseline.manifest["method"],
        "plan_digest": baseline.plan_digest,
        "baseline_notes": model_notes(baseline),
        "candidates": [
            {
                **s,
                **served(c).as_json(),
                "noise_floor_perturbed": c.noise_perturbed if c.noise_kl is not None else None,
                **_missing(c),
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


def _missing(comparison: Comparison) -> dict[str, str]:
    """Why there is no KL, if there is none."""
    why = comparison.manifest.get("kl_missing")
    return {"kl_missing": why} if why else {}


def comparison_table(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> list[Any]:
    """The table, the noise floor, and which candidates cannot be told apart."""
    baseline, facts = found[0].baseline, [served(c) for c in found]
    order = [i for members in in_groups(facts).values() for i in members]
    rows = [statistics[i] for i in order]
    names = [shown(name) for name in (baseline.manifest["model"], *(s["name"] for s in rows))]
    numbers = {
        statistic.column.title: [_cell(statistic, statistic.column, s) for s in rows]
        for statistic in STATISTICS
        if statistic.column is not None
    }
    numbers["over"] = [f"{s['groups']:,}" for s in rows]
    own = {"ppl": _number(statistics[0]["ppl_baseline"], 4)}
    columns = [Column(title, [own.get(title, "-"), *cells]) for title, cells in numbers.items()]
    kinds = _kinds([served_run(baseline), *(facts[i] for i in order)])
    return [
        BlockTable(names, [*kinds, *columns]),
        "",
        *_notes(found, statistics),
        _method_line(baseline.manifest, statistics[0]),
    ]


def _kinds(facts: Sequence[Served]) -> list[Column]:
    """Format, engine and bits per weight, if there are several formats or engines in the table."""
    formats, engines = [shown(f.format) for f in facts], [shown(f.engine) for f in facts]
    if len(set(formats)) == len(set(engines)) == 1:
        return []
    found = [
        Column(title, [middle_cut(cell, LONGEST_KIND) or "-" for cell in cells], number=False)
        for title, cells in (("format", formats), ("engine", engines))
        if len(set(cells)) > 1
    ]
    if any(f.bits_per_weight is not None for f in facts):
        found.append(Column("bits", ["-" if f.bits_per_weight is None else f"{f.bits_per_weight:.2f}" for f in facts]))
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


def _cell(statistic: Statistic, column: TerminalColumn, statistics: dict[str, Any]) -> str:
    value, error = statistics[statistic.name], statistics.get(f"{statistic.name}_stderr")
    if value is None:
        return NARROW if statistic.needs == "top" else "-"
    if statistic.percent:
        return f"{100 * value:.{column.digits}f}%"
    number = _number(value, column.digits)
    return f"{number} ± {error:.{column.digits}f}" if column.with_error and error is not None else number


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
