"""The charts section of the page: which charts are drawn, from which columns, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from markupsafe import Markup

from scoremode.report.html.drawing import Chart
from scoremode.report.html.histograms import delta_distribution, kl_distribution, surprise_distribution
from scoremode.report.html.position_chart import along_the_window
from scoremode.report.html.provenance import distinct_baselines, run_name
from scoremode.report.html.series import Positions, Series, column_of, delta_logprob, surprise
from scoremode.report.html.templating import fill
from scoremode.report.numbers import Statistics, usable
from scoremode.report.text import counted
from scoremode.statistics.comparison import Comparison
from scoremode.statistics.streams import array_blocks
from scoremode.store.run import Run
from scoremode.values import Floats


def charts_section(comparisons: Sequence[Comparison], statistics: Sequence[Statistics], alone: Sequence[Run]) -> Markup:
    drawn = _comparison_charts(comparisons, statistics) if comparisons else _run_charts(alone)
    figures = [figure for figure in drawn if figure]
    if not figures:
        return Markup()
    names = [c.name for c in comparisons] or [run_name(run, alone) for run in alone]
    noise = any(c.noise_kl is not None and len(c.noise_kl) for c in comparisons)
    notes = _notes_on_comparisons(comparisons) if comparisons else _notes_on_runs(alone)
    return fill("charts.html", figures=figures, names=names, noise=noise, notes=notes)


def _run_charts(alone: Sequence[Run]) -> list[Chart | None]:
    series = [Series(run_name(r, alone), partial(surprise, r), Positions(r).with_groups) for r in alone]
    text = "Mean surprise by position in the window; it falls as context grows."
    helps = along_the_window("How much context helps", text, series, "surprise, nats")
    return [surprise_distribution(series), helps]


def _comparison_charts(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> list[Chart | None]:
    places = [Positions(c.baseline, c.groups).with_groups for c in comparisons]
    deltas = [Series(c.name, partial(delta_logprob, c), place) for c, place in zip(comparisons, places, strict=True)]
    text = "Mean Δ logprob by position in the window; below zero, the text became less likely."
    title = "Where the text became less likely"
    drawn = [delta_distribution(deltas), along_the_window(title, text, deltas, "Δ logprob, nats")]
    if all(c.kl is None for c in comparisons):
        return drawn
    # a candidate without KL keeps its place, so that its colour is the same in every chart
    kls = [Series(c.name, partial(_kl, c), place) for c, place in zip(comparisons, places, strict=True)]
    noises = [c.noise_kl for c, _ in distinct_baselines(comparisons, statistics) if c.noise_kl is not None]
    noise = column_of(np.concatenate(noises)) if any(map(len, noises)) else None
    floor = next((f for s in statistics if (f := usable(s.get("noise_floor_kl_p99")))), None)
    text = "Mean KL by position in the window, with one standard error."
    drift = along_the_window("Does drift grow with context?", text, kls, "KL, nats")
    return [kl_distribution(kls, noise, floor), drawn[0], drift, drawn[1]]


def _kl(c: Comparison) -> Iterator[Floats]:
    for block in array_blocks(c.groups if c.kl is None else c.kl):
        yield np.full(len(block), np.nan) if c.kl is None else block


def _unbounded(blocks: Iterable[Floats]) -> str:
    """How many tokens are not drawn, in words; '' if all are."""
    count = sum(int((~np.isfinite(block)).sum()) for block in blocks)
    return f"{counted(count, 'tokens')} left out of the charts: probability zero" if count else ""


def _notes_on_comparisons(comparisons: Sequence[Comparison]) -> list[str]:
    notes = []
    for c in comparisons:
        if left_out := _unbounded(delta_logprob(c)):
            notes.append(f"{c.name}: {left_out} in one of the models.")
        below = 0 if c.kl is None else sum(int((block < 0).sum()) for block in array_blocks(c.kl))
        if below:
            where = "drawn at the left end of its distribution; a mean below zero is not drawn by model size"
            notes.append(f"{c.name}: {counted(below, 'tokens')} with a KL below zero, {where}.")
        if c.kl is None:
            why = "no KL, because two finished runs were compared, and runs do not store whole distributions"
            notes.append(f"{c.name}: {c.manifest.get('kl_missing') or why}.")
    return notes


def _notes_on_runs(alone: Sequence[Run]) -> list[str]:
    counted_out = [(run, _unbounded(surprise(run))) for run in alone]
    return [f"{run_name(run, alone)}: {left_out}." for run, left_out in counted_out if left_out]
