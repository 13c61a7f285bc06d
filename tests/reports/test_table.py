"""Tables for people: numbers to the digits that their errors justify, names unchanged."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import scoremode as sm
from scoremode.console.terminal import renderable
from scoremode.core.verbs.prob.sequence import SequenceScore, TokenScore
from scoremode.reports.runs import run_blocks, sequence_blocks, with_error
from scoremode.values import Estimate


def drawn(parts: Sequence[Any], width: int = 200) -> str:
    out = io.StringIO()
    screen = Console(file=out, width=width, highlight=False, emoji=False)
    for part in parts:
        screen.print(renderable(part))
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("abcxyz", ["bc«x»"]),
        ("".join(map(chr, range(50, 90))) + "!", ["".join(map(chr, range(63, 90))) + "«!»"]),
        ("a[/b]", ["«[»", "[«/»", "[/«b»", "[/b«]»"]),
        ("a\x1b\x07", []),
    ],
)
def test_the_worst_tokens_stand_in_their_context(text: str, lines: Sequence[str]) -> None:
    """Worst first; nothing of a text is a command to the terminal."""
    run = sm.ppl("table:successor", text=text)
    out = drawn(run_blocks(run, 99))
    shown = out.partition("worst-predicted tokens")[2].splitlines()[2:]
    assert [line.partition("» ")[0] + "»" for line in shown][: len(lines)] == lines
    assert "worst-predicted" not in drawn(run_blocks(run))
    assert not {"\x1b", "\x07"} & set(out)


def test_a_token_that_was_scored_twice_is_listed_once() -> None:
    run = sm.ppl("table:uniform", text="abcdefghij", method="exl3-2025", context_length=4, stride=1)
    assert drawn(run_blocks(run, 99)).count("«") == len(set(run.facts.token.tolist())) < len(run.scores)


def score(target: str = " Paris", **changes: Any) -> SequenceScore:
    values: dict[str, Any] = {
        "prompt": "The capital of France is",
        "target": target,
        "log_prob": -0.5,
        "prob": math.exp(-0.5),
        "perplexity": math.exp(0.5),
        "boundary": "clean",
        "tokens": (TokenScore(7, target, -0.5, 1),),
    }
    return SequenceScore(**{**values, **changes})


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (12.7412, 0.3149, "12.74 ± 0.31"),
        (1234.5, 56.7, "1,234 ± 57"),
        (0.5, 0.00012, "0.50000 ± 0.00012"),
        (3.0, 0.0, "3.000 ± 0"),
        (3.0, None, "3.000"),
        (291.8165, None, "291.8"),
        (3401829.3215, None, "3.40e6"),
        (1e6, 2e4, "1,000,000 ± 20,000"),
        (math.nan, None, "none (no whole word or byte was scored)"),
        (math.inf, None, "unbounded (a target has probability zero)"),
    ],
)
def test_a_value_has_the_digits_that_its_error_allows(value: float, stderr: float | None, text: str) -> None:
    assert with_error(Estimate(value, stderr, 100, 10)) == text


def test_a_note_stands_below_what_it_is_about() -> None:
    run = sm.ppl("table:uniform", text="abcdefgh", context_length=4)
    notes = {"model_notes": ["slow here"], "notes": [*run.manifest["notes"], "slow here"]}
    run = replace(run, manifest={**run.manifest, **notes})
    lines = [" ".join(line.split()) for line in drawn(run_blocks(run)).splitlines()]
    assert lines.index("context length 4 instead of the recipe's 2048") < lines.index("slow here")
    assert lines[lines.index("slow here") - 1].startswith("model table:uniform")


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([score(), score(prompt="Another\nprompt")], ["Another⏎prompt"]),
        ([score(boundary="spanning", condition=" Fran")], ["begins with ' Fran'"]),
        ([score(leading_space="add")], ["--leading-space add"]),
        ([score(log_prob=-math.inf, prob=0.0, perplexity=math.inf)], ["-inf"]),
        ([score("[/red]"), score("[red]", prompt="[/bold]")], ["'[/red]'", "'[red]'", "[/bold]"]),  # no markup
    ],
)
def test_what_is_said_of_targets(results: list[SequenceScore], words: list[str]) -> None:
    out = drawn(sequence_blocks(results))
    assert [one for one in words if one not in out] == []
