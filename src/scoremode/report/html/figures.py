"""The charts section of the page: which charts are drawn, and from which columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scoremode.report.html import charts
from scoremode.report.html.charts import Series, escaped
from scoremode.report.html.numbers import Statistics, usable
from scoremode.report.html.runs import delta_logprob, distinct_baselines, positions, run_name
from scoremode.report.text import counted
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run

# ── charts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def charts_section(comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]) -> str:
    drawn: list[str | None] = []
    if comparisons:
        drawn += _comparison_charts(comparisons, statistics)
    else:
        series = [Series(run_name(r, alone), -r.scores.logprob, positions(r), r.facts.group) for r in alone]
        text = "Mean surprise by position in the window; it falls as context grows."
        drawn.append(charts.surprise_distribution(series))
        drawn.append(charts.along_the_window("How much context helps", text, series, "surprise, nats"))
    figures = [figure for figure in drawn if figure]
    if not figures:
        return ""
    names = [c.name for c in comparisons] or [run_name(run, alone) for run in alone]
    keys = "".join(f"<li>{charts.swatch(i)} {escaped(name)}</li>" for i, name in enumerate(names))
    if any(c.noise_kl is not None and len(c.noise_kl) for c in comparisons):
        keys += '<li><span class="noise-key" aria-hidden="true"></span> noise floor: the baseline against itself</li>'
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in _chart_notes(comparisons, alone))
    kind = "four" if len(figures) in (2, 4) else "six"
    return (
        '<section id="charts" aria-labelledby="charts-title"><h2 id="charts-title">Charts</h2>'
        f'<ul class="legend">{keys}</ul><div class="charts {kind}">{"".join(figures)}</div>{notes}</section>\n'
    )


def _comparison_charts(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> list[str | None]:
    place = {id(c): positions(c.baseline) for c in comparisons}
    deltas = [Series(c.name, delta_logprob(c), place[id(c)], c.groups) for c in comparisons]
    # a candidate without KL keeps its place, so that its colour is the same in every chart
    kls = [
        Series(c.name, c.kl if c.kl is not None else np.full(len(c.groups), np.nan), place[id(c)], c.groups)
        for c in comparisons
    ]
    drawn: list[str | None] = []
    if any(c.kl is not None for c in comparisons):
        noises = [c.noise_kl for c, _ in distinct_baselines(comparisons, statistics) if c.noise_kl is not None]
        floor = next((s.get("noise_floor_kl_p99") for s in statistics if usable(s.get("noise_floor_kl_p99"))), None)
        noise = np.concatenate(noises) if noises else None
        drawn.append(charts.kl_distribution(kls, noise, [("noise 99%", usable(floor))]))
    drawn.append(charts.delta_distribution(deltas))
    if any(c.kl is not None for c in comparisons):
        text = "Mean KL by position in the window, with one standard error."
        drawn.append(charts.along_the_window("Does drift grow with context?", text, kls, "KL, nats"))
    text = "Mean Δ logprob by position in the window; below zero, the text became less likely."
    drawn.append(charts.along_the_window("Where the text became less likely", text, deltas, "Δ logprob, nats"))
    return drawn


def _chart_notes(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> list[str]:
    notes = []
    for c in comparisons:
        unbounded = int((~np.isfinite(delta_logprob(c))).sum())
        if unbounded:
            left_out = f"{counted(unbounded, 'tokens')} left out of the charts"
            notes.append(f"{c.name}: {left_out}: probability zero in one of the models.")
        if c.kl is None:
            why = "no KL, because two finished runs were compared, and runs do not store whole distributions"
            notes.append(f"{c.name}: {c.manifest.get('kl_missing') or why}.")
    for run in () if comparisons else alone:
        unbounded = int((~np.isfinite(run.scores.logprob)).sum())
        if unbounded:
            left_out = f"{counted(unbounded, 'tokens')} left out of the charts: probability zero."
            notes.append(f"{run_name(run, alone)}: {left_out}")
    return notes
