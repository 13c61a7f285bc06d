"""The tables of the page: comparisons, runs, and the measures in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scoremode.report.html import charts
from scoremode.report.html.charts import escaped
from scoremode.report.html.numbers import Statistics, cell_with_error, file_size, usable
from scoremode.report.html.plane import mark_key
from scoremode.report.html.provenance import facts_list, served_facts
from scoremode.report.html.runs import distinct_baselines, run_name
from scoremode.report.served import Served, in_groups, served, served_run
from scoremode.report.text import NOT_MEASURED, counted, model_notes, noise_words, top_words
from scoremode.statistics.comparison import STATISTICS, Comparison
from scoremode.statistics.gate import too_few
from scoremode.store.run import NEEDS, Run
from scoremode.values import Estimate

# ── summary ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Measure:
    """A column of the summary table."""

    name: str  # in the statistics
    label: str
    about: str
    better: Literal["low", "high", "one", "none"] = "low"  # one: closer to 1 is better
    percent: bool = False

    def cell(self, statistics: Statistics) -> str:
        value = statistics.get(self.name)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return cell_with_error(value, statistics.get(f"{self.name}_stderr"), percent=self.percent)


MEASURES = tuple(Measure(s.name, s.label, s.about, s.better, s.percent) for s in STATISTICS if s.label)

RUN_MEASURES = (
    ("perplexity", "Perplexity", False),
    ("bits_per_byte", "Bits/byte", False),
    ("word_perplexity", "Word PPL", False),
    ("top1_accuracy", "Top-1", True),
    ("mean_rank", "Mean rank", False),
    ("mean_entropy", "Entropy, nats", False),
)


def summary_section(comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]) -> str:
    tables = ""
    if comparisons:
        tables += comparisons_table(comparisons, statistics)
    if alone:
        tables += runs_table(alone)
    return (
        f'<section id="summary" aria-labelledby="summary-title"><h2 id="summary-title">Summary</h2>{tables}</section>\n'
    )


def comparisons_table(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """One row per candidate, in groups of one format and engine, below the baseline and its noise floor."""
    shown = [m for m in MEASURES if any(s.get(m.name) is not None for s in statistics)]
    marks = {m.name: _best_and_worst(m, statistics) for m in shown}
    facts = [served(c) for c in comparisons]
    size = _size_title(facts)
    head = "".join(f'<th scope="col"><abbr title="{escaped(m.about)}">{escaped(m.label)}</abbr></th>' for m in shown)
    head = f'<th scope="col">Model</th>{size.head if size else ""}{head}'
    bodies = ["".join(_reference_rows(c, s, shown, size) for c, s in distinct_baselines(comparisons, statistics))]
    groups, columns = in_groups(facts), 1 + bool(size) + len(shown)
    for number, (group, members) in enumerate(groups.items()):
        rows = [_group_row(number, group, columns)] if len(groups) > 1 else []
        for i in members:
            cells = size.cell(size_cell(facts[i])) if size else ""
            cells += "".join(_marked_cell(m, statistics[i], marks[m.name].get(i)) for m in shown)
            name = f'<th scope="row">{charts.swatch(i)} {escaped(comparisons[i].name)}</th>'
            whole = f'<p><a href="#run-{i}">everything about this run</a></p>'
            how = _how_row(comparisons[i].candidate, facts[i], columns, whole)
            rows.append(f'<tr class="described">{name}{cells}</tr>{how}')
        bodies.append("".join(rows))
    marked = any(marks[m.name] for m in shown)
    legend = '<span class="best key">best</span> <span class="worst key">worst</span> in its column. ' if marked else ""
    floors = dict.fromkeys(noise_words(c, s) for c, s in distinct_baselines(comparisons, statistics))
    missing = dict.fromkeys(map(top_words, comparisons))
    notes = dict.fromkeys(f"baseline: {note}" for c in comparisons for note in model_notes(c.baseline))
    said = "".join(f" {escaped(words[:1].upper() + words[1:])}." for words in (*floors, *missing, *notes) if words)
    errors = escaped(_about_errors(comparisons, statistics))
    note = f"{legend}{errors}. KL is in nats per token.{said}"
    return _table(head, bodies, f'<p class="note">{note}</p>')


@dataclass(frozen=True)
class SizeColumn:
    """The column of bits per weight; of sizes, if no format tells its bits."""

    label: str
    about: str

    @property
    def head(self) -> str:
        return f'<th scope="col"><abbr title="{escaped(self.about)}">{escaped(self.label)}</abbr></th>'

    def cell(self, inside: str) -> str:
        return f'<td data-label="{escaped(self.label)}">{inside or "–"}</td>'


def _size_title(facts: Sequence[Served]) -> SizeColumn | None:
    if any(f.bits_per_weight is not None for f in facts):
        return SizeColumn("Bits/weight", "stored bits per weight, all weights together; the size of the weights below")
    return SizeColumn("Size", "the stored size of the weights") if any(f.stored_bytes for f in facts) else None


def _group_row(number: int, name: str, columns: int) -> str:
    heading = f"{mark_key(number)} {escaped(name)}"
    return f'<tr class="group"><th scope="rowgroup" colspan="{columns}">{heading}</th></tr>'


def _how_row(run: Run, its: Served, columns: int, after: str = "") -> str:
    """How the model above was served: one line, and behind a click all of its facts."""
    facts = facts_list(served_facts(run, its))
    summary = f"<summary>{escaped(its.line or 'how it was served')}</summary>"
    return f'<tr class="how"><td colspan="{columns}"><details>{summary}{facts}{after}</details></td></tr>'


def _about_errors(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> str:
    """What the errors of a table are based on, or why there are none, in words."""
    found = []
    for c, s in distinct_baselines(comparisons, statistics):
        kind = str(c.baseline.manifest.get("stderr_groups", "groups"))
        groups = int(usable(s.get("groups")) or 0)
        known = s.get("worse_stderr") is not None
        error = f"± is one standard error over {counted(groups, kind)}"
        found.append(error if known else f"No ±: {too_few(groups, kind)}")
    return "; ".join(dict.fromkeys(found))


def _table(head: str, bodies: Iterable[str], after: str = "") -> str:
    body = "".join(f"<tbody>{rows}</tbody>" for rows in bodies)
    # a table wider than the page scrolls sideways; the tabindex makes it reachable by keyboard
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Summary table">'
        f'<table class="summary"><thead><tr>{head}</tr></thead>{body}</table></div>{after}'
    )


def _reference_rows(comparison: Comparison, s: Statistics, shown: Sequence[Measure], size: SizeColumn | None) -> str:
    """The baseline, and its noise floor in the same columns."""
    model = escaped(comparison.baseline.manifest.get("model", "baseline"))
    baseline = {
        "ppl_candidate": cell_with_error(s.get("ppl_baseline"), s.get("ppl_baseline_stderr")),
        "bits_per_byte_candidate": cell_with_error(s.get("bits_per_byte_baseline")),
    }
    noise = {
        "kl_mean": cell_with_error(s.get("noise_floor_kl_mean")),
        "kl_p99": cell_with_error(s.get("noise_floor_kl_p99")),
    }
    its = served_run(comparison.baseline)
    own = size_cell(its) if size else ""
    rows = _reference_row(f'{model} <span class="tag">baseline</span>', baseline, shown, size, own, kind="described ")
    rows += _how_row(comparison.baseline, its, 1 + bool(size) + len(shown))
    if usable(s.get("noise_floor_kl_mean")) is not None or usable(s.get("noise_floor_kl_p99")) is not None:
        again = 'noise floor <span class="tag">baseline against itself</span>'
        rows += _reference_row(again, noise, shown, size, "")
    return rows


def _reference_row(
    name: str,
    cells: Mapping[str, str],
    shown: Sequence[Measure],
    size: SizeColumn | None,
    own_size: str,
    *,
    kind: str = "",
) -> str:
    own = (size.cell(own_size) if own_size else '<td class="none"></td>') if size else ""
    rest = "".join(
        f'<td data-label="{escaped(m.label)}">{cells[m.name]}</td>' if m.name in cells else '<td class="none"></td>'
        for m in shown
    )
    return f'<tr class="{kind}reference"><th scope="row">{name}</th>{own}{rest}</tr>'


def _best_and_worst(measure: Measure, statistics: Sequence[Statistics]) -> dict[int, str]:
    """Which rows have a column's best and worst value; none if all are equal."""
    known = [(float(v), i) for i, s in enumerate(statistics) if (v := usable(s.get(measure.name))) is not None]
    if measure.better == "one":
        known = [(abs(math.log(value)) if value > 0 else math.inf, i) for value, i in known]
    if measure.better == "none" or len({value for value, _ in known}) < 2:
        return {}
    low, high = min(known)[0], max(known)[0]
    best, worst = (high, low) if measure.better == "high" else (low, high)
    return {i: "best" if value == best else "worst" for value, i in known if value in (best, worst)}


def _marked_cell(measure: Measure, statistics: Statistics, mark: str | None) -> str:
    said = f'<span class="unseen"> ({mark})</span>' if mark else ""
    kind = f' class="{mark}"' if mark else ""
    return f'<td{kind} data-label="{escaped(measure.label)}">{measure.cell(statistics)}{said}</td>'


def size_cell(its: Served) -> str:
    """Bits per weight above the size of the weights, as HTML; '' if neither is known."""
    stored = file_size(its.stored_bytes) if its.stored_bytes is not None else ""
    if its.bits_per_weight is None:
        return escaped(stored)
    return f"{its.bits_per_weight:.2f}" + (f' <span class="error">{escaped(stored)}</span>' if stored else "")


def runs_table(alone: Sequence[Run]) -> str:
    known = [m for m in RUN_MEASURES if m[0] in NEEDS or any(m[0] in run.manifest.get("metrics", {}) for run in alone)]
    head = '<th scope="col">Run</th><th scope="col">Tokens</th>'
    head += "".join(f'<th scope="col">{escaped(label)}</th>' for _, label, _ in known)
    rows = []
    for i, run in enumerate(alone):
        metrics = run.manifest.get("metrics", {})
        cells = f'<td data-label="Tokens">{len(run.scores):,}</td>'
        for name, label, percent in known:
            stored = metrics.get(name)
            estimate = Estimate.from_json(stored) if stored else None
            nothing = f'<span title="{NOT_MEASURED}">–</span>' if name in NEEDS else "–"
            cell = cell_with_error(estimate.value, estimate.stderr, percent=percent) if estimate else nothing
            cell += groups_line(estimate, run) if estimate else ""
            cells += f'<td data-label="{escaped(label)}">{cell}</td>'
        rows.append(f'<tr><th scope="row">{charts.swatch(i)} {escaped(run_name(run, alone))}</th>{cells}</tr>')
    said = "".join(f" {escaped(words)}" for words in _not_measured(alone))
    note = f'<p class="note">± is one standard error over the groups in parentheses.{said}</p>'
    return _table(head, ["".join(rows)], note)


def _not_measured(alone: Sequence[Run]) -> list[str]:
    """Which numbers an engine did not measure, one sentence per run."""
    found = []
    for run in alone:
        metrics = run.manifest.get("metrics", {})
        missing = [label for name, label, _ in RUN_MEASURES if name in NEEDS and name not in metrics]
        names = [label.partition(",")[0].lower() for label in missing]  # without its unit
        if not run.scores.has("top"):
            names.append("first choices")
        if names:
            found.append(f"{run_name(run, alone)}: {', '.join(names)} {NOT_MEASURED}.")
    return found


def groups_line(estimate: Estimate, run: Run) -> str:
    kind = str(run.manifest.get("stderr_groups", "groups"))
    said = too_few(estimate.groups, kind) if estimate.stderr is None else counted(estimate.groups, kind)
    return f' <span class="error">({escaped(said)})</span>' if math.isfinite(estimate.value) else ""
