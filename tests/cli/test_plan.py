"""scoremode plan: what would be done, before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Command

LONG = "Once upon a time there was a little girl named Lily. " * 60


def test_json_has_the_promised_facts(command: Command) -> None:
    outcome = command("plan", "table:uniform", "--text", "one two three", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json.keys() >= {"windows", "targets", "forward_tokens", "plan_digest"}


def test_the_digest_does_not_depend_on_the_file_name(command: Command, tmp_path: Path) -> None:
    digests = set()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same text")
        digests.add(command("plan", "table:uniform", "--corpus", tmp_path / name, "--json").json["plan_digest"])
    assert len(digests) == 1


def test_what_was_adjusted_is_said(command: Command) -> None:
    arguments = ["table:uniform", "--text", LONG, "--context-length", 64, "--stride", 16]
    notes = command("plan", *arguments, "--json").json["notes"]
    assert notes == ["context length 64 instead of the recipe's 2048", "stride 16 instead of the recipe's 512"]


def test_no_engine_is_started(command: Command, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("scoremode.core.engine.registry.open_engine", opened)
    assert command("plan", stories, "--text", "Once upon a time").code == 0


def test_a_plan_leaves_nothing_behind(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    command("plan", "table:uniform", "--text", "one two")
    assert not (tmp_path / "cache").exists()


def test_memory_counts_the_weights_of_the_checkpoint(command: Command, stories: Path) -> None:
    memory = command("plan", stories, "--text", "Once upon a time", "--json").json["memory"]
    size = (stories / "model.safetensors").stat().st_size
    assert 0.9 * size < memory["weights"] <= size
