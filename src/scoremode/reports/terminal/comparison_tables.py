"""Comparisons of models as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from scoremode.core.scores.schema import DIVERGENCE, KL
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.gate import too_few
from scoremode.core.statistics.ranking import pairs_tested, rank
from scoremode.core.statistics.statistic import Statistic
from scoremode.reports.numbers import baseline_perplexity, shown_statistic, shown_statistics, statistics_for_people
from scoremode.reports.public_text import public_name
from scoremode.reports.served import ServedModel, baseline_cache, in_order, served, served_manifest
from scoremode.reports.terminal.console import BlockTable, TableColumn
from scoremode.reports.text import (
    NOT_MEASURED,
    counted,
    default_text,
    model_notes,
    noise_words,
    path_notes,
    shown,
    top_words,
)
from scoremode.reports.verdicts import rule_words, verdicts
from scoremode.values import rounded

Row = Mapping[str, Any]

NARROW = NOT_MEASURED.replace(" ", "\n")  # no wider than its column's title, to leave room for the other columns


NARROW_IF_MISSING = {"top", *(column.name for column in DIVERGENCE if column is not KL)}


def comparison_json(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    baseline = found[0].baseline
    return {
        "baseline": baseline.manifest["model"],
        "baseline_served": served_manifest(baseline.manifest).as_json(),
        "method": baseline.manifest["method"],
        "plan_digest": baseline.plan_digest,
        "baseline_notes": [*default_text(baseline), *model_notes(baseline)],
        "candidates": [
            {
                **s,
                "verdict": verdict.level,
                "sentence": verdict.sentence,
                "scale": verdict.scale,
                "for_people": statistics_for_people(s, statistics),
                **served(c).as_json(),
                "notes": model_notes(c.candidate),
                "noise_floor_perturbed": c.noise_perturbed if c.noise_kl is not None else None,
                **{name: c.manifest[name] for name in ("kl_missing", "rerun", "promise") if c.manifest.get(name)},
            }
            for c, s, verdict in zip(found, statistics, verdicts(found, statistics), strict=True)
        ],
    }


def comparison_table(
    found: Sequence[Comparison], statistics: Sequence[dict[str, Any]], more: Sequence[str] = ()
) -> list[Any]:
    """The table, a sentence per candidate, the noise floor, and which candidates cannot be told apart.

    ``more`` are the names of statistics that the table has in addition to the usual ones.
    """
    baseline, facts = found[0].baseline, [served(c) for c in found]
    order = in_order(facts)
    rows = [statistics[i] for i in order]
    names = [shown(name) for name in (public_name(found[0].baseline_name), *(s["name"] for s in rows))]
    columns = []
    for statistic in shown_statistics(found, more):
        if (column := statistic.column) is not None:
            own = baseline_perplexity(statistics) if statistic.name == "ppl_candidate" else "-"
            columns.append(TableColumn(column.title, [own, *(_cell(statistic, s) for s in rows)], leaves=column.leaves))
    kind = str(baseline.manifest["stderr_groups"]).partition(" of ")[0]  # a heading is short
    groups = TableColumn(kind, ["-", *(f"{s['groups']:,}" for s in rows)], leaves=4)
    below, bits = _kinds([served_manifest(baseline.manifest), *(facts[i] for i in order)])
    if types := baseline_cache(found):
        below[0].append(shown(types))
    return [
        BlockTable(names, [*bits, *columns, groups], below),
        "",
        *_sentences(found, statistics, order),
        "",
        *_notes(found, statistics),
        _method_line(baseline.manifest, statistics[0]),
        *(Text(shown(line), "red" if ": finding: " in line else "dim") for line in path_notes(found)),
    ]


def _kinds(facts: Sequence[ServedModel]) -> tuple[list[list[str]], list[TableColumn]]:
    """For each row the line below its name (format, engine), and the column of bits per weight.

    Only what differs between rows is shown.
    """
    formats, engines = [shown(f.format_and_body) for f in facts], [shown(f.engine) for f in facts]
    if len(set(formats)) == len(set(engines)) == 1:
        return [[] for _ in facts], []
    lines = [cells for cells in (formats, engines) if len(set(cells)) > 1]
    below = [[", ".join(cells[i] for cells in lines if cells[i])] for i in range(len(facts))]
    if all(f.bits_per_weight is None for f in facts):
        return below, []
    title = "bits\noverall" if any("-bit body" in f.format_and_body for f in facts) else "bits"
    cells = ["-" if f.bits_per_weight is None else f"{f.bits_per_weight:.2f}" for f in facts]
    return below, [TableColumn(title, cells)]


def _sentences(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]], order: Sequence[int]) -> list[Text]:
    judged = verdicts(found, statistics)
    styles = {"changed, worse": "red", "changed, better": "green", "changed": "yellow"}
    lines = list[Text]()
    for i in order:
        lines.append(Text(shown(f"{found[i].name}: {judged[i].sentence}"), styles.get(judged[i].level, "")))
        lines += [Text(judged[i].scale, "dim")] if judged[i].scale else []
    return lines


def _method_line(m: Any, s: dict[str, Any]) -> Text:
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in m["method_settings"].items())
    kind = m["stderr_groups"]
    rests_on = f"± over {counted(s['groups'], kind)}" if s["worse_stderr"] is not None else too_few(s["groups"], kind)
    return Text(shown(f"{m['method']} ({settings}), {counted(s['targets'], 'targets')}, {rests_on}"), "dim")


def _notes(found: Sequence[Comparison], statistics: Sequence[dict[str, Any]]) -> list[Text]:
    said = noise_words(found[0], statistics[0])
    notes = [Text(shown(note), "yellow") for note in default_text(found[0].baseline)]
    notes += [Text(shown(said))] if said else []
    of_models: dict[str, list[str]] = {}  # by note, because many models may share one
    for run in dict.fromkeys([found[0].baseline, *(c.candidate for c in found)]):
        for note in model_notes(run):
            of_models.setdefault(note, []).append(run.manifest.get("variant") or public_name(run.manifest["model"]))
    notes += [Text(shown(f"{', '.join(names)}: {note}"), "yellow") for note, names in of_models.items()]
    missing = {str(why): None for c in found if (why := c.manifest.get("kl_missing"))}
    notes += [Text(shown(why)) for why in missing]
    notes += [Text(shown(why)) for why in dict.fromkeys(map(top_words, found)) if why]
    if not any(c.kl is None or c.is_of_paths for c in found) and len(found) > 1:
        for entry in rank(list(found)):
            if entry.tied_with:
                others = ", ".join(entry.tied_with)
                notes.append(Text(shown(f"{entry.name} cannot be told apart from {others}"), "yellow"))
        notes += [Text(words, "dim") for words in [pairs_tested(len(found))] if words]
    return [*notes, Text(rule_words(found), "dim")]


def above_error(row: Row, name: str, *, percent: bool = False, sign: str = "") -> str:
    """A number above its error; ``sign`` stands before numbers above 0."""
    if row[name] is None:
        return "-"
    number, error = rounded(row[name], row.get(f"{name}_stderr"), percent=percent)
    return f"{sign if row[name] > 0 else ''}{number}\n{error}".rstrip()


def _cell(statistic: Statistic, s: Mapping[str, Any]) -> str:
    if s[statistic.name] is None:
        return NARROW if statistic.needs in NARROW_IF_MISSING else "-"
    return "\n".join(shown_statistic(statistic, s)).rstrip()
