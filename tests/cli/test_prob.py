"""scoremode prob: one result a pair, JSON lines in and out, and an interrupted call that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Command


def test_json_is_a_list_of_objects_with_the_promised_facts(command: Command, stories: Path) -> None:
    outcome = command("prob", stories, "--prompt", "Once upon a", "--target", " time", "--target", " cat", "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    for found in outcome.json:
        assert found.keys() >= {"prompt", "target", "log_prob", "prob", "perplexity", "boundary", "tokens"}
        assert found["tokens"]
        assert all(token.keys() >= {"id", "text", "logprob", "rank"} for token in found["tokens"])


def test_the_file_and_the_screen_say_the_same(command: Command, tmp_path: Path) -> None:
    arguments = ["prob", "table:uniform", "--prompt", "ab", "--target", "c", "--target", "é\u2028", "--json"]
    printed = command(*arguments, "--out", tmp_path / "results.jsonl").json
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines if line] == printed


def test_results_that_are_there_are_read_and_that_is_said(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    out = tmp_path / "results.jsonl"
    scored = ("prob", "table:uniform", "--prompt", "a", "--target", "b", "--out", out)
    assert command(*scored).out == f"1 results in {out}\n"
    assert command(*scored).out == f"1 results in {out}; they were kept: --fresh scores again\n"
    assert command(*scored, "--fresh").out == f"1 results in {out}\n"
