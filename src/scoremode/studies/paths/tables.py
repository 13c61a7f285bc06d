"""The tables of ``scoremode noise``, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from scoremode.reports.terminal.console import BlockTable, TableColumn
from scoremode.reports.text import counted, shown
from scoremode.studies.paths.noise import Noise


def noise_table(noise: Noise) -> list[Any]:
    """Makes the tables of ``scoremode noise``: drift per target, then perplexity, whole sequences and repeats."""
    names = list(noise.settings[0].settings)
    header = ", ".join(name.replace("_", "-") for name in names) or "setting"
    labels, drifts, rest = [header], list[tuple[str, ...]](), list[tuple[str, ...]]()
    for s in noise.settings:
        d, r = s.drift, s.repeats
        values = ["default" if value is None else str(value) for value in s.settings.values()]
        labels.append(shown(", ".join(values) or s.facts.engine))
        drifts.append((s.facts.head, _size(d.mean, "+"), *map(_size, (d.mean_abs, d.rms, d.p999, d.max))))
        again = ("–", "–") if r is None else (_size(r.rms), _size(r.max))
        ratio = f"{s.perplexity_ratio:.6f}" if math.isfinite(s.perplexity_ratio) else "–"
        rest.append((f"{s.perplexity:,.5f}", ratio, _size(d.sequence_rms), _size(d.sequence_max), *again))
    first = _settings_table(labels, ("head", "mean", "mean |d|", "rms", "99.9%", "max"), drifts)
    titles = ("perplexity", "ratio", "seq. rms", "seq. max", "repeat rms", "repeat max")
    second = _settings_table(labels, titles, rest)
    plan = noise.plan
    scored = f"{counted(plan.targets, 'targets')} in {counted(len(plan), 'windows')} of {noise.corpus}"
    about = f"{scored}, {noise.model}; {noise.repeat} {'pass' if noise.repeat == 1 else 'passes'}"
    return [
        Text("drift of log-probabilities against the first setting, nats per target", "bold"),
        first,
        Text(),
        Text(f"perplexity; drift of whole {noise.sequences}; drift of the same setting when repeated", "bold"),
        second,
        Text(),
        *(Text(shown(s.promise), "red" if "finding:" in s.promise else "") for s in noise.settings if s.promise),
        *(Text(shown(note), "yellow") for note in plan.notes),
        Text(shown(about), "dim"),
    ]


def _settings_table(labels: Sequence[str], titles: Sequence[str], rows: Sequence[Sequence[str]]) -> BlockTable:
    """Makes a table of settings; the first of the labels is their title."""
    cells = zip(titles, zip(*rows, strict=True), strict=True)
    columns = [TableColumn(title, its, number=title != "head") for title, its in cells]
    return BlockTable(labels[1:], columns, title=labels[0])


def _size(value: float, sign: str = "") -> str:
    return "0" if value == 0 else "unbounded" if not math.isfinite(value) else f"{value:{sign}.2e}"
