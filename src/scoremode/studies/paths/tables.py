"""What ``scoremode paths --vary noise`` shows."""

from __future__ import annotations

import math

from scoremode.reports.table import Block, Cell, Column, Note, Row, Table, words
from scoremode.reports.text import counted
from scoremode.studies.paths.noise import Noise


def noise_blocks(noise: Noise) -> list[Block]:
    """Drift per target, then perplexity, whole sequences and repeats."""
    settings, plan = noise.settings, noise.plan
    corner = ", ".join(name.replace("_", "-") for name in settings[0].settings) or "setting"
    rows = []
    for s in settings:
        values = ["default" if value is None else str(value) for value in s.settings.values()]
        rows.append(Row(", ".join(values) or s.facts.engine))
    drift = [
        words("head", [s.facts.head for s in settings]),
        Column("mean", [Cell(_size(s.drift.mean, "+")) for s in settings]),
        Column("mean |d|", [Cell(_size(s.drift.mean_abs)) for s in settings]),
        Column("rms", [Cell(_size(s.drift.rms)) for s in settings]),
        Column("99.9%", [Cell(_size(s.drift.p999)) for s in settings]),
        Column("max", [Cell(_size(s.drift.max)) for s in settings]),
    ]
    ratios = [s.perplexity_ratio for s in settings]
    rest = [
        Column("perplexity", [Cell(f"{s.perplexity:,.5f}") for s in settings]),
        Column("ratio", [Cell(f"{ratio:.6f}" if math.isfinite(ratio) else "–") for ratio in ratios]),
        Column("seq. rms", [Cell(_size(s.drift.sequence_rms)) for s in settings]),
        Column("seq. max", [Cell(_size(s.drift.sequence_max)) for s in settings]),
        Column("repeat rms", [Cell("–" if s.repeats is None else _size(s.repeats.rms)) for s in settings]),
        Column("repeat max", [Cell("–" if s.repeats is None else _size(s.repeats.max)) for s in settings]),
    ]
    second = f"perplexity; drift of whole {noise.sequences}; drift of the same setting when repeated"
    scored = f"{counted(plan.targets, 'targets')} in {counted(len(plan), 'windows')} of {noise.corpus}"
    about = f"{scored}, {noise.model}; {noise.repeat} {'pass' if noise.repeat == 1 else 'passes'}"
    return [
        Table(rows, drift, "drift of log-probabilities against the first setting, nats per target", corner),
        "",
        Table(rows, rest, second, corner),
        "",
        *(Note(s.promise, "red" if "finding:" in s.promise else "") for s in settings if s.promise),
        *(Note(note, "yellow") for note in plan.notes),
        Note(about, "dim"),
    ]


def _size(value: float, sign: str = "") -> str:
    return "0" if value == 0 else "unbounded" if not math.isfinite(value) else f"{value:{sign}.2e}"
