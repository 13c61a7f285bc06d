"""scoremode info methods, info engines and report in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from scoremode.core.disk.manifests import sealed
from scoremode.core.engine.registry import known_engines
from scoremode.core.plan.recipes import METHODS
from tests.command_line import Command, Refused


@pytest.mark.parametrize(("about", "names"), [("methods", METHODS), ("engines", known_engines())])
def test_every_method_and_engine_is_listed(command: Command, about: str, names: Iterable[str]) -> None:
    outcome = command("info", about)
    assert outcome.code == 0
    assert [name for name in names if name not in outcome.out] == []


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_is_shown_with_its_windows_drawn(command: Command, name: str) -> None:
    outcome = command("info", "methods", name)
    assert (outcome.code, "feed" in outcome.out, "[" in outcome.out) == (0, True, True)


def test_one_method_as_json_says_its_defaults(command: Command) -> None:
    [found] = command("info", "methods", "exl3-2025", "--json").json
    assert (found["context"], found["stride"], found["max_windows"]) == (2048, 512, 100)


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def kept(command: Command, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    assert command("ppl", "table:uniform", "--text", "one two three", "--out", folder).code == 0
    return folder


def test_report_as_json_has_the_numbers_of_the_run(command: Command, kept: Path) -> None:
    again = command("ppl", "table:uniform", "--text", "one two three", "--out", kept, "--json").json
    assert {**command("report", kept, "--json").json, "cached": True} == again


def test_report_prints_what_ppl_printed(command: Command, tmp_path: Path) -> None:
    printed = command("ppl", "table:uniform", "--text", "one two three", "--out", tmp_path / "run").out
    assert command("report", tmp_path / "run").out == printed


def test_an_unfinished_run_says_how_to_finish_it(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "partial.journal").write_bytes(b"{}\n")
    assert "run the same command again to resume" in refused("report", tmp_path)


def test_a_run_of_a_later_format_is_refused(refused: Refused, kept: Path) -> None:
    manifest = json.loads((kept / "manifest.json").read_text())
    (kept / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    assert "format 99" in refused("report", kept)


def test_report_prints_no_control_characters_of_a_manifest(command: Command, tmp_path: Path) -> None:
    """A manifest that was changed and sealed again: every text in it that may be anything is one with ESC."""
    command("ppl", "table:uniform", "--text", "abcdef", "--out", tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    bad = "\x1b[2J\x9b"
    manifest["method_settings"]["stride"] = bad
    for name in ("method", "model", "engine", "stderr_groups", "tokenizer"):
        manifest[name] = f"{name}{bad}"
    del manifest["seal"]
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(sealed(manifest)))
    for arguments in (["report", tmp_path / "run"], ["report", tmp_path / "run", "--json"]):
        outcome = command(*arguments)
        assert "\x1b" not in outcome.out + outcome.err
        if "--json" not in arguments:
            assert "\x9b" not in outcome.out + outcome.err
