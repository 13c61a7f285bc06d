"""scoremode plan: what would be done, before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import scoremode as sm
from scoremode.core.plan.recipes import METHODS
from tests.command_line import Command, Refused

LEAST = {"windows", "targets", "forward_tokens", "plan_digest"}
LONG = "Once upon a time there was a little girl named Lily. " * 60


def test_json_has_the_promised_facts(command: Command) -> None:
    outcome = command("plan", "table:uniform", "--text", "one two three", "--json")
    assert outcome.code == 0
    assert outcome.json.keys() >= LEAST
    assert outcome.err == ""


def test_the_counts_of_the_field_come_out(command: Command, tmp_path: Path) -> None:
    """39,217 tokens at 2048/512: 73 windows and 149,431 targets in exl3-2025, 74 and 39,216 in sliding-once."""
    (tmp_path / "a.txt").write_text("x" * 39217)
    arguments = ["table:uniform", "--corpus", tmp_path / "a.txt", "--context-length", 2048, "--stride", 512, "--json"]
    found = [command("plan", *arguments, "--method", name).json for name in ("exl3-2025", "sliding-once")]
    assert [(f["windows"], f["targets"]) for f in found] == [(73, 149_431), (74, 39_216)]


def test_a_plan_has_the_digest_of_the_run(command: Command) -> None:
    arguments = ["table:uniform", "--text", "one two three", "--json"]
    assert command("plan", *arguments).json["plan_digest"] == command("ppl", *arguments).json["plan_digest"]


def test_the_digest_does_not_depend_on_the_file_name(command: Command, tmp_path: Path) -> None:
    digests = set()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same text")
        digests.add(command("plan", "table:uniform", "--corpus", tmp_path / name, "--json").json["plan_digest"])
    assert len(digests) == 1


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_can_be_planned(command: Command, stories: Path, name: str) -> None:
    outcome = command("plan", stories, "--text", LONG, "--method", name, "--context-length", 64, "--json")
    assert (outcome.code, outcome.json["method"], outcome.json["targets"] > 0) == (0, name, True)


def test_what_was_adjusted_is_said(command: Command) -> None:
    arguments = ["table:uniform", "--text", LONG, "--context-length", 64, "--stride", 16]
    notes = command("plan", *arguments, "--json").json["notes"]
    assert notes == ["context length 64 instead of the recipe's 2048", "stride 16 instead of the recipe's 512"]


def test_the_limit_of_windows_is_said_and_can_be_lifted(command: Command) -> None:
    arguments = ["plan", "table:uniform", "--text", LONG, "--method", "exl3-2025"]
    arguments += ["--context-length", "32", "--stride", "16", "--json"]
    limited, lifted = command(*arguments).json, command(*arguments, "--max-windows", 0).json
    assert (limited["windows"], lifted["windows"]) == (100, len(range(0, len(LONG) - 32, 16)))
    assert f"100 of {lifted['windows']} windows scored" in limited["notes"]


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


def test_the_table_is_for_people(command: Command) -> None:
    out = command("plan", "table:uniform", "--text", "one two three").out
    assert [word for word in ("windows", "targets", "forward tokens", "memory", "plan digest") if word not in out] == []


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_recipes_own_context_longer_than_the_models_is_refused(refused: Refused, stories: Path) -> None:
    """Shortened quietly, it would no longer be the recipe."""
    assert "gptq's own context of 2048" in refused("plan", stories, "--text", LONG, "--method", "gptq")


def test_a_stride_for_a_method_that_has_none_is_refused(refused: Refused) -> None:
    assert "leave --stride out" in refused("plan", "table:uniform", "--text", LONG, "--method", "gptq", "--stride", 5)


def test_the_real_wikitext_with_another_text_is_two_documents(
    tmp_path: Path, wikitext_file: Path, command: Command
) -> None:
    (tmp_path / "other.txt").write_text("Another text, of its own.")
    texts: list[str] = [f"wikitext2:{wikitext_file}", str(tmp_path / "other.txt")]
    made = sm.plan("table:uniform", corpus=texts)
    alone = [command("plan", "table:uniform", "--corpus", text, "--json").json for text in texts]
    assert made["documents"] == 2
    assert made["notes"] == ["2 texts scored as separate documents: wikitext2, other.txt"]
    for count in ("tokens", "targets", "windows", "forward_tokens"):
        assert made[count] == sum(one[count] for one in alone), count
