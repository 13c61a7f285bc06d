"""A plan as a table for a terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from scoremode.report.terminal.console import Facts
from scoremode.report.terminal.run import method_line
from scoremode.report.text import counted, shown


def plan_table(plan: dict[str, Any]) -> list[Any]:
    table = Facts()
    table.line("method", method_line(plan))
    for note in plan["notes"]:
        table.line("", Text(note, "yellow"))
    size = f"{counted(plan['documents'], 'documents')}, {counted(plan['tokens'], 'tokens')}"
    table.line("text", shown(f"{plan['corpus']}, {size}"))
    table.line("windows", f"{plan['windows']:,}")
    table.line("targets", f"{plan['targets']:,} ({100 * plan['coverage']:.1f}% of the tokens covered)")
    table.line("forward tokens", f"{plan['forward_tokens']:,}")
    for w in plan["first_windows"]:
        lead = f"[{w['lead']}] + " if w["lead"] >= 0 else ""
        line = f"feeds {lead}{w['feeds_from']}…{w['feeds_to'] - 1}, scores {w['scores_from']}…{w['scores_to'] - 1}"
        table.line("", Text(line, "dim"))
    memory = plan["memory"]
    line = ", ".join(
        f"{name.replace('_', ' ')} {in_bytes(memory[name])}" for name in ("weights", "activations", "logits")
    )
    whole = in_bytes(memory["logits_if_whole"])
    if any(memory[name] for name in ("weights", "activations", "logits")):  # else the model is elsewhere, or a table
        table.line("memory, about", f"{line} (all logits at once would take {whole})")
    if kept := plan["reference"]:
        logits = in_bytes(kept["logits_fp16"])
        table.line("as a reference", f"{in_bytes(kept['total'])} on disk (float16 logits would take {logits})")
    table.line("plan digest", plan["plan_digest"])
    return [table]


def in_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
