"""Probabilities of targets as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from scoremode.report.text import shown
from scoremode.verbs.prob.sequence import SequenceScore, TokenScore


def sequence_table(results: Sequence[SequenceScore]) -> list[Any]:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("target")
    for name in ("log prob", "prob", "perplexity"):
        table.add_column(name, justify="right", no_wrap=True)
    ranked = any(t.rank is not None for r in results for t in r.tokens)
    table.add_column("tokens (logprob, rank)" if ranked else "tokens (logprob; rank not measured)")
    prompts = list(dict.fromkeys(r.prompt for r in results))
    for prompt in prompts:
        if len(prompts) > 1:
            table.add_row(Text(shown(prompt), "dim"), "", "", "", "")
        for r in (r for r in results if r.prompt == prompt):
            tokens = "  ".join(map(_token, r.tokens))
            row = (
                Text(repr(shown(r.target))),
                f"{r.log_prob:.5f}",
                f"{r.prob:.4g}",
                f"{r.perplexity:,.4g}",
                Text(tokens),
            )
            table.add_row(*row)
    return [table, *_boundary_notes(results)]


def _token(token: TokenScore) -> str:
    return f"{shown(token.text)!r} {token.logprob:.3f}" + ("" if token.rank is None else f" #{token.rank}")


def _boundary_notes(results: Iterable[SequenceScore]) -> list[Text]:
    spanning = list(dict.fromkeys(r.condition for r in results if r.boundary == "spanning"))
    added = any(r.leading_space == "add" for r in results)
    notes = [
        Text(f"a token spans the end of the prompt: scored given that it begins with {shown(part)!r}", "yellow")
        for part in spanning
    ]
    return notes + [Text("a leading space was added to targets without one (--leading-space add)", "yellow")] * added
