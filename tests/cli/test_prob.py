"""scoremode prob: one result a pair, JSON lines in and out, and an interrupted call that goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scoremode.core.verbs.prob.sequence import SequenceProbability
from tests.command_line import Command

PAIRS = [("ab", "cd"), ("ab", "c"), ("xyz", "é")]


def write_pairs(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": p, "target": t} for p, t in pairs]


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs each call of the model was given."""
    sizes: list[int] = []
    original = SequenceProbability.score

    def counted(self: Any, pairs: Any, progress: Any = None) -> Any:
        sizes.append(len(pairs))
        return original(self, pairs, progress)

    monkeypatch.setattr(SequenceProbability, "score", counted)
    return sizes


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_json_is_a_list_of_objects_with_the_promised_facts(command: Command, stories: Path) -> None:
    outcome = command("prob", stories, "--prompt", "Once upon a", "--target", " time", "--target", " cat", "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    for found in outcome.json:
        assert found.keys() >= {"prompt", "target", "log_prob", "prob", "perplexity", "boundary", "tokens"}
        assert found["tokens"]
        assert all(token.keys() >= {"id", "text", "logprob", "rank"} for token in found["tokens"])


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_table_shows_targets_with_their_tokens(command: Command) -> None:
    out = command("prob", "table:uniform", "--prompt", "ab", "--target", "cd").out
    assert [word for word in ("'cd'", "log prob", "perplexity", "'c' -5.545 #100") if word not in out] == []


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_file_and_the_screen_say_the_same(command: Command, tmp_path: Path) -> None:
    arguments = ["prob", "table:uniform", "--prompt", "ab", "--target", "c", "--target", "é\u2028", "--json"]
    printed = command(*arguments, "--out", tmp_path / "results.jsonl").json
    assert results(tmp_path / "results.jsonl") == printed


# ── whose file it is ─────────────────────────────────────────────────────────────────────────────────────────────────
ONE = ("prob", "table:uniform", "--prompt", "a", "--target", "b", "--out")


def test_results_that_are_there_are_read_and_that_is_said(
    command: Command, tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    out = tmp_path / "results.jsonl"
    assert command(*ONE, out).out == f"1 results in {out}\n"
    assert command(*ONE, out).out == f"1 results in {out}; they were kept: --fresh scores again\n"
    assert asked == [1]
    assert command(*ONE, out, "--fresh").out == f"1 results in {out}\n"
    assert asked == [1, 1]
