"""A run as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from scoremode.report.terminal.console import Facts
from scoremode.report.terminal.numbers import basis, with_error
from scoremode.report.text import NOT_MEASURED, context_before, counted, shown, worst_targets
from scoremode.store.run import Run
from scoremode.values import Estimate

NUMBERS = (
    ("perplexity", "perplexity"),
    ("bits_per_byte", "bits per byte"),
    ("word_perplexity", "word perplexity"),
)

WIDEST = 28  # characters of the longest number that the other numbers are aligned with


def run_table(run: Run, worst: int = 8) -> list[Any]:
    """What ``scoremode ppl`` and ``scoremode show`` print."""
    m = run.manifest
    of_columns = sorted((metric for _, metric in run.schema.metrics), key=lambda metric: metric.share_of is None)
    labels = dict(NUMBERS) | {metric.name: shown(metric.label) for metric in of_columns}
    shares = {metric.name for metric in of_columns if metric.share_of is not None}
    metrics = {name: Estimate.from_json(m["metrics"][name]) for name in labels if name in m["metrics"]}
    table = Facts()
    always = {metric.name for metric in of_columns}
    shown_metrics = [(name, label) for name, label in labels.items() if name in metrics or name in always]
    numbers = {name: with_error(known, percent=name in shares) for name, known in metrics.items()}
    wide = max((len(number) for number in numbers.values() if len(number) <= WIDEST), default=0)
    for name, label in shown_metrics:
        if name not in metrics:
            table.line(label, Text(NOT_MEASURED, "dim"))
            continue
        number = Text(numbers[name].ljust(wide), "bold" * (name == "perplexity"))
        known = metrics[name].stderr is not None
        rests_on = basis(metrics[name], m["stderr_groups"], percent=name in shares) if known else ""
        table.line(label, Text.assemble(number, (f"   {rests_on}", "dim")))
    first = metrics.get("perplexity")
    if first is not None and first.stderr is None and math.isfinite(first.value):
        table.line("", Text(basis(first, m["stderr_groups"]), "yellow"))
    table.line("", "")
    covered = f"{100 * m['coverage']:.1f}% of the {m['tokens']:,} tokens covered"
    scored = f"{m['targets']:,} in {counted(m['windows'], 'windows')}, {covered}"
    table.line("tokens scored", scored)
    table.line("method", method_line(m))
    for note in m["notes"]:
        table.line("", Text(note, "yellow"))
    table.line("text", shown(f"{m['corpus']} ({m['corpus_bytes']:,} bytes, sha256 {m['corpus_sha256'][:12]}…)"))
    table.line("model", shown(f"{m['model']} on {m['engine']}, {m['dtype']}, head {m['head']}, {m['device']}"))
    speed = m["tokens_per_second"]
    if speed is not None:
        table.line("speed", f"{speed:,.0f} tokens/s ({m['forward_tokens']:,} tokens fed in {m['seconds']:.1f} s)")
    table.line("plan", m["plan_digest"][:16] + "…")
    parts: list[Any] = [table]
    if worst:
        parts += [Text(), Text("worst-predicted tokens", "bold"), worst_table(run, worst)]
    return parts


def questions_table(found: Sequence[Run]) -> list[Any]:
    """One row per question to one model."""
    first = found[0].manifest
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("text", "method"):
        table.add_column(name, overflow="fold")
    for name in ("perplexity", "bits per byte", "targets"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found:
        numbers = [
            with_error(Estimate.from_json(run.manifest["metrics"][name])) if name in run.manifest["metrics"] else "–"
            for name in ("perplexity", "bits_per_byte")
        ]
        row = (shown(run.manifest["corpus"]), method_line(run.manifest), *numbers, f"{run.manifest['targets']:,}")
        table.add_row(*map(Text, row))
    model = shown(f"{first['model']} on {first['engine']}, {first['dtype']}, head {first['head']}, {first['device']}")
    notes = [Text(shown(line), "yellow") for line in _shared_notes(found)]
    return [Text(model, "dim"), Text(), table, *([Text(), *notes] if notes else [])]


def _shared_notes(found: Sequence[Run]) -> list[str]:
    """Each note once; with the questions that it is about, unless it is about all of them."""
    about: dict[str, list[str]] = {}
    for run in found:
        for note in dict.fromkeys(run.manifest["notes"]):
            about.setdefault(note, []).append(f"{run.manifest['corpus']} by {run.manifest['method']}")
    return [note if len(named) == len(found) else f"{', '.join(named)}: {note}" for note, named in about.items()]


def method_line(manifest: dict[str, Any] | Any) -> str:
    settings = manifest["method_settings"]
    names = (("context_length", "context"), ("stride", "stride"))
    given = ", ".join(f"{label} {settings[name]}" for name, label in names if name in settings)
    return shown(f"{manifest['method']} ({given})")


def worst_table(run: Run, count: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("in context", no_wrap=True, overflow="crop", max_width=56, justify="right")
    table.add_column("logprob", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("the model expected", no_wrap=True, overflow="ellipsis")
    ranked = run.scores.has("rank")
    for index in worst_targets(run, count):
        token = shown(str(run.facts.value("text", index)))
        before = shown(context_before(run, index, max(8, 50 - len(token))))
        table.add_row(
            Text.assemble((before, "dim"), ("«", "dim"), (token, "bold red"), ("»", "dim")),
            f"{run.scores.value('logprob', index):.2f}",
            f"{run.scores.value('rank', index):,}" if ranked else NOT_MEASURED,
            Text(_expected(run, index)),
        )
    return table


def _expected(run: Run, index: int) -> str:
    """The model's first choice and its probability."""
    if not (run.facts.has("top_text") and run.scores.has("top_logprob")):
        return NOT_MEASURED
    word, logprob = run.facts.value("top_text", index), run.scores.value("top_logprob", index)
    return f"{shown(str(word))!r} p={math.exp(logprob):.2f}"
