"""Runs, plans and probabilities as tables for a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scoremode.display.text import context_before, shown, worst_targets
from scoremode.groups import FEWEST
from scoremode.sequence import SequenceScore
from scoremode.types import Estimate, Run

NUMBERS = (
    ("perplexity", "perplexity"),
    ("bits_per_byte", "bits per byte"),
    ("word_perplexity", "word perplexity"),
    ("top1_accuracy", "top-1 accuracy"),
    ("mean_rank", "mean rank"),
    ("mean_entropy", "entropy (nats)"),
)


DUST = 1e-9  # of a value: an error below that is what rounding left
WIDEST = 28  # characters of a number that others are lined up with


class PlainConsole(Console):
    """A console that leaves a closed pipe to the command line's edge instead of ending the process itself."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Standard output; at least 100 columns wide where it is not a terminal, so that files are not folded."""
    width = None if sys.stdout.isatty() else 100
    return PlainConsole(width=width, highlight=False, emoji=False, markup=False)


def with_error(estimate: Estimate, percent: bool = False) -> str:
    """``12.74 ± 0.31``: the value to the digits that its error allows.

    >>> with_error(Estimate(12.7412, 0.3149, 100, 10))
    '12.74 ± 0.31'
    """
    factor, unit = (100.0, "%") if percent else (1.0, "")
    value = estimate.value * factor
    if math.isnan(value):
        return "none (no whole word or byte was scored)"
    if math.isinf(value):
        return "unbounded (a target has probability zero)"
    if estimate.stderr is None:
        return f"{value:,.4f}{unit}"
    error = estimate.stderr * factor
    if error <= DUST * abs(value):
        return f"{value:,.4f}{unit} ± 0"
    digits = _digits(error)
    return f"{value:,.{digits}f}{unit} ± {error:,.{digits}f}{unit}"


def _digits(error: float) -> int:
    return min(8, max(0, 1 - math.floor(math.log10(error))))


def basis(estimate: Estimate, kind: str, percent: bool = False) -> str:
    """What an error rests on: its groups, and the bounds that they allow.

    >>> basis(Estimate(12.7412, 0.3149, 100, 10, 9.0, 12.0288, 13.4536), "documents")
    '10 documents, 95%: 12.03 to 13.45'
    >>> basis(Estimate(12.7412, None, 100, 3), "documents")
    'too few groups for an error: 3 documents, 5 are needed'
    """
    counted = f"{estimate.groups:,} {kind}"
    if not math.isfinite(estimate.value):
        return ""
    if estimate.stderr is None or estimate.low is None or estimate.high is None:
        return f"too few groups for an error: {counted}, {FEWEST} are needed"
    factor, unit = (100.0, "%") if percent else (1.0, "")
    some = estimate.stderr > DUST * abs(estimate.value)
    digits = _digits(estimate.stderr * factor) if some else 4
    low, high = (f"{bound * factor:,.{digits}f}{unit}" for bound in (estimate.low, estimate.high))
    return f"{counted}, 95%: {low} to {high}"


def run_table(run: Run, worst: int = 8) -> list[Any]:
    """What ``scoremode ppl`` and ``scoremode show`` print."""
    m = run.manifest
    metrics = {name: Estimate.from_json(m["metrics"][name]) for name, _ in NUMBERS if name in m["metrics"]}
    table = Facts()
    shown_metrics = [(name, label) for name, label in NUMBERS if name in metrics]
    numbers = {name: with_error(metrics[name], percent=name == "top1_accuracy") for name, _ in shown_metrics}
    wide = max((len(number) for number in numbers.values() if len(number) <= WIDEST), default=0)
    for name, label in shown_metrics:
        number = Text(numbers[name].ljust(wide), "bold" * (name == "perplexity"))
        known = metrics[name].stderr is not None
        rests_on = basis(metrics[name], m["stderr_groups"], percent=name == "top1_accuracy") if known else ""
        table.line(label, Text.assemble(number, (f"   {rests_on}", "dim")))
    first = metrics.get("perplexity")
    if first is not None and first.stderr is None and math.isfinite(first.value):
        table.line("", Text(basis(first, m["stderr_groups"]), "yellow"))
    table.line("", "")
    covered = f"{100 * m['coverage']:.1f}% of the {m['tokens']:,} tokens covered"
    scored = f"{m['targets']:,} in {m['windows']:,} windows, {covered}"
    table.line("tokens scored", scored)
    table.line("method", _method_line(m))
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


def _method_line(manifest: dict[str, Any] | Any) -> str:
    settings = manifest["method_settings"]
    names = (("context_length", "context"), ("stride", "stride"))
    given = ", ".join(f"{label} {settings[name]}" for name, label in names if name in settings)
    return f"{manifest['method']} ({given})"


def worst_table(run: Run, count: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("in context", no_wrap=True, overflow="crop", max_width=56, justify="right")
    table.add_column("logprob", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("the model expected", no_wrap=True, overflow="ellipsis")
    for index in worst_targets(run, count):
        token = shown(str(run.facts.text[index]))
        before = shown(context_before(run, index, max(8, 50 - len(token))))
        expected = f"{shown(str(run.facts.top_text[index]))!r} p={math.exp(run.scores.top_logprob[index]):.2f}"
        table.add_row(
            Text.assemble((before, "dim"), ("«", "dim"), (token, "bold red"), ("»", "dim")),
            f"{run.scores.logprob[index]:.2f}",
            f"{run.scores.rank[index]:,}",
            Text(expected),
        )
    return table


def plan_table(plan: dict[str, Any]) -> list[Any]:
    table = Facts()
    table.line("method", _method_line(plan))
    for note in plan["notes"]:
        table.line("", Text(note, "yellow"))
    table.line("text", shown(f"{plan['corpus']}, {plan['documents']:,} documents, {plan['tokens']:,} tokens"))
    table.line("windows", f"{plan['windows']:,}")
    table.line("targets", f"{plan['targets']:,} ({100 * plan['coverage']:.1f}% of the tokens covered)")
    table.line("forward tokens", f"{plan['forward_tokens']:,}")
    for w in plan["first_windows"]:
        lead = f"[{w['lead']}] + " if w["lead"] >= 0 else ""
        line = f"feeds {lead}{w['feeds_from']}…{w['feeds_to'] - 1}, scores {w['scores_from']}…{w['scores_to'] - 1}"
        table.line("", Text(line, "dim"))
    memory = plan["memory"]
    line = ", ".join(
        f"{name.replace('_', ' ')} {_bytes(memory[name])}" for name in ("weights", "activations", "logits")
    )
    table.line("memory, about", f"{line} (logits whole would be {_bytes(memory['logits_if_whole'])})")
    if kept := plan["reference"]:
        logits = _bytes(kept["logits_fp16"])
        table.line("as a reference", f"{_bytes(kept['total'])} on disk (float16 logits would be {logits})")
    table.line("plan digest", plan["plan_digest"])
    return [table]


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def sequence_table(results: Sequence[SequenceScore]) -> list[Any]:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("target")
    for name in ("log prob", "prob", "perplexity"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens (logprob, rank)")
    prompts = list(dict.fromkeys(r.prompt for r in results))
    for prompt in prompts:
        if len(prompts) > 1:
            table.add_row(Text(shown(prompt), "dim"), "", "", "", "")
        for r in (r for r in results if r.prompt == prompt):
            tokens = "  ".join(f"{shown(t.text)!r} {t.logprob:.3f} #{t.rank}" for t in r.tokens)
            row = (
                Text(repr(shown(r.target))),
                f"{r.log_prob:.5f}",
                f"{r.prob:.4g}",
                f"{r.perplexity:,.4g}",
                Text(tokens),
            )
            table.add_row(*row)
    return [table, *_boundary_notes(results)]


def _boundary_notes(results: Iterable[SequenceScore]) -> list[Text]:
    spanning = list(dict.fromkeys(r.condition for r in results if r.boundary == "spanning"))
    added = any(r.leading_space == "add" for r in results)
    notes = [
        Text(f"a token spans the end of the prompt: scored given that it begins with {shown(part)!r}", "yellow")
        for part in spanning
    ]
    return notes + [Text("a leading space was added where a target had none (--leading-space add)", "yellow")] * added


def listing(rows: Iterable[tuple[str, str]]) -> list[Any]:
    table = Facts()
    for name, text in rows:
        table.line(Text(name, "bold"), text)
    return [table]


class Facts(Table):
    """Labels and values, two columns; a plain string is shown as it is, never read as markup."""

    def __init__(self) -> None:
        super().__init__(box=None, show_header=False, padding=(0, 3, 0, 0))
        self.add_column(style="dim", no_wrap=True)
        self.add_column(overflow="fold")

    def line(self, label: str | Text, value: str | Text) -> None:
        self.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in (label, value)))
