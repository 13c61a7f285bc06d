"""The charts section of the page: which charts are drawn, and from which columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from scoremode.report.html import charts
from scoremode.report.html.charts import escaped
from scoremode.report.html.numbers import Statistics, usable
from scoremode.report.html.runs import distinct_baselines, run_name
from scoremode.report.html.series import Positions, Series, column_of, delta_logprob, surprise
from scoremode.report.text import counted
from scoremode.statistics.comparison import Comparison
from scoremode.statistics.streams import array_blocks
from scoremode.store.run import Run
from scoremode.values import Floats

# ── charts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def charts_section(comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]) -> str:
    drawn: list[str | None] = []
    if comparisons:
        drawn += _comparison_charts(comparisons, statistics)
    else:
        series = [Series(run_name(r, alone), partial(surprise, r), Positions(r).with_groups) for r in alone]
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
    places = [Positions(c.baseline, c.groups).with_groups for c in comparisons]
    deltas = [Series(c.name, partial(delta_logprob, c), place) for c, place in zip(comparisons, places, strict=True)]
    # a candidate without KL keeps its place, so that its colour is the same in every chart
    kls = [Series(c.name, partial(_kl, c), place) for c, place in zip(comparisons, places, strict=True)]
    drawn: list[str | None] = []
    if any(c.kl is not None for c in comparisons):
        noises = [c.noise_kl for c, _ in distinct_baselines(comparisons, statistics) if c.noise_kl is not None]
        floor = next((s.get("noise_floor_kl_p99") for s in statistics if usable(s.get("noise_floor_kl_p99"))), None)
        noise = column_of(np.concatenate(noises)) if any(map(len, noises)) else None
        drawn.append(charts.kl_distribution(kls, noise, [("noise 99%", usable(floor))]))
    drawn.append(charts.delta_distribution(deltas))
    if any(c.kl is not None for c in comparisons):
        text = "Mean KL by position in the window, with one standard error."
        drawn.append(charts.along_the_window("Does drift grow with context?", text, kls, "KL, nats"))
    text = "Mean Δ logprob by position in the window; below zero, the text became less likely."
    drawn.append(charts.along_the_window("Where the text became less likely", text, deltas, "Δ logprob, nats"))
    return drawn


def _kl(c: Comparison) -> Iterator[Floats]:
    for block in array_blocks(c.groups if c.kl is None else c.kl):
        yield np.full(len(block), np.nan) if c.kl is None else block


def _unbounded(blocks: Iterable[Floats]) -> int:
    return sum(int((~np.isfinite(block)).sum()) for block in blocks)


def _chart_notes(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> list[str]:
    notes = []
    for c in comparisons:
        unbounded = _unbounded(delta_logprob(c))
        if unbounded:
            left_out = f"{counted(unbounded, 'tokens')} left out of the charts"
            notes.append(f"{c.name}: {left_out}: probability zero in one of the models.")
        below = 0 if c.kl is None else sum(int((block < 0).sum()) for block in array_blocks(c.kl))
        if below:
            where = "drawn at the left end of its distribution; a mean below zero is not drawn by model size"
            notes.append(f"{c.name}: {counted(below, 'tokens')} with a KL below zero, {where}.")
        if c.kl is None:
            why = "no KL, because two finished runs were compared, and runs do not store whole distributions"
            notes.append(f"{c.name}: {c.manifest.get('kl_missing') or why}.")
    for run in () if comparisons else alone:
        unbounded = _unbounded(surprise(run))
        if unbounded:
            left_out = f"{counted(unbounded, 'tokens')} left out of the charts: probability zero."
            notes.append(f"{run_name(run, alone)}: {left_out}")
    return notes
