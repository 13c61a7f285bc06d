"""Drift between settings as tables for a terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table
from rich.text import Text

from scoremode.report.text import counted, shown
from scoremode.verbs.noise import Noise, SettingNoise


def noise_table(noise: Noise) -> list[Any]:
    """What ``scoremode noise`` prints: drift per target, then perplexity, whole sequences and repeats."""
    names = list(noise.settings[0].settings)
    header = ", ".join(name.replace("_", "-") for name in names) or "setting"
    first = _table(header, "head", "mean", "mean |d|", "rms", "99.9%", "max")
    second = _table(header, "perplexity", "ratio", "seq. rms", "seq. max", "repeat rms", "repeat max")
    for s in noise.settings:
        d, r = s.drift, s.repeats
        label = _label(s)
        first.add_row(label, s.facts.head, _signed(d.mean), *map(_size, (d.mean_abs, d.rms, d.p999, d.max)))
        again = ("–", "–") if r is None else (_size(r.rms), _size(r.max))
        ratio = f"{s.perplexity_ratio:.6f}" if math.isfinite(s.perplexity_ratio) else "–"
        numbers = (_size(d.sequence_rms), _size(d.sequence_max), *again)
        second.add_row(label, f"{s.perplexity:,.5f}", ratio, *numbers)
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
        Text(shown(about), "dim"),
    ]


def _table(label: str, *names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(Text(label), overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="left" if name == "head" else "right", no_wrap=True)
    return table


def _label(setting: SettingNoise) -> Text:
    values = ["default" if value is None else str(value) for value in setting.settings.values()]
    return Text(", ".join(values) or setting.facts.engine, "bold")


def _size(value: float) -> str:
    return "0" if value == 0 else "unbounded" if not math.isfinite(value) else f"{value:.2e}"


def _signed(value: float) -> str:
    return "0" if value == 0 else "unbounded" if not math.isfinite(value) else f"{value:+.2e}"
