"""The table of ``scoremode rollouts``."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.text import Text

from scoremode.report.terminal.console import Facts
from scoremode.report.terminal.run_tables import model_line
from scoremode.report.text import shown
from scoremode.text.rollouts import Rollouts

FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # and what leaves nothing out


def rollouts_table(found: Rollouts, folder: str) -> list[Any]:
    """What was written, how it ended, and what to do with it."""
    m, table = found.manifest, Facts()
    lengths = [len(ids) for ids in found.written]
    table.line("texts", f"{len(found):,} of {found.prompts:,} prompts")
    table.line("tokens", f"{found.tokens:,} written, {np.mean(lengths):,.1f} per text")
    table.line("ended by", ", ".join(f"{name} {count:,}" for name, count in m["finish"].items() if count))
    table.line("drawn", drawn_line(m))
    if found.tokens:
        raw = np.concatenate(found.raw_logprob)
        table.line("logprob", f"{raw.mean():.4f} per token in the model's own distribution")
    for note in m["notes"]:
        table.line("", Text(shown(note), "yellow"))
    table.line("model", model_line(m))
    if m.get("tokens_per_second") is not None:
        table.line("speed", f"{m['tokens_per_second']:,.0f} tokens/s")
    name = shown(folder)
    return [table, Text(), Text(f"kept in {name}; scoremode ppl MODEL --corpus rollouts:{name}")]


def drawn_line(manifest: dict[str, Any]) -> str:
    """How tokens were drawn, in a few words."""
    sampling = manifest["sampling"]
    if not sampling["temperature"]:
        return "greedily"
    filters = [
        f"{name.replace('_', '-')} {sampling[name]:g}" for name, none in FILTERS.items() if sampling[name] != none
    ]
    return ", ".join([f"temperature {sampling['temperature']:g}", *filters, f"seed {manifest['seed']}"])
