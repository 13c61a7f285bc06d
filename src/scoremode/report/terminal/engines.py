"""Engines as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from scoremode.report.terminal.console import Facts
from scoremode.report.text import shown


def engines_table(found: Sequence[dict[str, Any]]) -> list[Any]:
    table = Facts()
    for engine in found:
        name = Text(shown(engine["name"]), "bold")
        if engine["summary"] is None:
            table.line(name, Text(shown(f"cannot be used: {engine['problem']}"), "yellow"))
            continue
        table.line(name, shown(engine["summary"]))
        if engine["problem"]:
            table.line("", Text(shown(engine["problem"]), "yellow"))
        missing = [words for key, words in MISSING.items() if not engine["capabilities"][key]]
        if missing:
            table.line("", Text(f"without {', '.join(missing)}", "dim"))
    return [table]


MISSING = {
    "rank": "ranks",
    "entropy": "entropy",
    "top": "first choices",
    "hidden_states": "references",
    "divergence": "KL",
}
"""What an engine may lack, in words."""
