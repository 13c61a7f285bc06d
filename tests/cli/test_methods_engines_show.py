"""scoremode methods, engines and show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scoremode.core.engine.registry import known_engines
from scoremode.core.plan.recipes import METHODS
from tests.command_line import Command, Refused


def test_every_method_is_listed(command: Command) -> None:
    outcome = command("methods")
    assert outcome.code == 0
    assert [name for name in METHODS if name not in outcome.out] == []


def test_methods_as_json_are_a_list_of_objects(command: Command) -> None:
    found = command("methods", "--json").json
    assert [method["name"] for method in found] == list(METHODS)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_is_shown_with_its_windows_drawn(command: Command, name: str) -> None:
    outcome = command("methods", name)
    assert (outcome.code, "feed" in outcome.out, "[" in outcome.out) == (0, True, True)


def test_one_method_as_json_says_its_defaults(command: Command) -> None:
    [found] = command("methods", "exl3-2025", "--json").json
    assert (found["context"], found["stride"], found["max_windows"]) == (2048, 512, 100)


def test_an_unknown_method_suggests_the_nearest(refused: Refused) -> None:
    assert "did you mean 'gptq'?" in refused("methods", "gtpq")


def test_every_engine_is_listed(command: Command) -> None:
    outcome = command("engines")
    assert outcome.code == 0
    assert [name for name in known_engines() if name not in outcome.out] == []


def test_engines_as_json_are_a_list_of_objects(command: Command) -> None:
    assert {engine["name"] for engine in command("engines", "--json").json} == set(known_engines())


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def kept(command: Command, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    assert command("ppl", "table:uniform", "--text", "one two three", "--out", folder).code == 0
    return folder


def test_show_as_json_has_the_numbers_of_the_run(command: Command, kept: Path) -> None:
    again = command("ppl", "table:uniform", "--text", "one two three", "--out", kept, "--json").json
    assert {**command("show", kept, "--json").json, "cached": True} == again


def test_show_prints_what_ppl_printed(command: Command, tmp_path: Path) -> None:
    printed = command("ppl", "table:uniform", "--text", "one two three", "--out", tmp_path / "run").out
    assert command("show", tmp_path / "run").out == printed


def test_the_worst_tokens_can_be_left_out(command: Command, kept: Path) -> None:
    assert "worst-predicted" not in command("show", kept, "--worst", 0).out


def test_a_negative_number_of_worst_tokens_is_refused(refused: Refused, kept: Path) -> None:
    assert "--worst" in refused("show", kept, "--worst", -1)


def test_a_folder_that_does_not_exist_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert "is not a run" in refused("show", tmp_path / "none")


def test_a_folder_of_something_else_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"")
    assert "is not a run" in refused("show", tmp_path)


def test_a_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is not a run" in refused("show", tmp_path / "file")


def test_an_unfinished_run_says_how_to_finish_it(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "partial.journal").write_bytes(b"{}\n")
    assert "run the same command again to resume" in refused("show", tmp_path)


def test_a_manifest_of_something_else_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page", "icons": []}')
    assert "manifest.json" in refused("show", tmp_path)


def test_a_run_of_a_later_format_is_refused(refused: Refused, kept: Path) -> None:
    manifest = json.loads((kept / "manifest.json").read_text())
    (kept / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    assert "format 99" in refused("show", kept)


def without(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k not in names}))

    return damage


def cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])

    return damage


def flipped(folder: Path) -> None:
    data = bytearray((folder / "scores.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "scores.parquet").write_bytes(data)


def gone(folder: Path) -> None:
    (folder / "scores.parquet").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        cut("manifest.json"),
        cut("scores.parquet"),
        flipped,
        gone,
        without("scores_sha256"),
        without("metrics"),
        without("windows"),
        without("coverage", "notes"),
    ],
    ids=[
        "manifest cut",
        "scores cut",
        "a bit flipped",
        "scores gone",
        "no hash",
        "no metrics",
        "no windows",
        "no notes",
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_a_damaged_run_is_refused(
    refused: Refused, kept: Path, damage: Callable[[Path], None], flags: list[str]
) -> None:
    damage(kept)
    assert str(kept) in refused("show", kept, *flags)


def test_show_prints_no_control_characters_of_a_manifest(command: Command, tmp_path: Path) -> None:
    """A manifest that was changed and sealed again: every text in it that may be anything is one with ESC."""
    from scoremode.core.disk.manifests import sealed

    command("ppl", "table:uniform", "--text", "abcdef", "--out", tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    bad = "\x1b[2J\x9b"
    manifest["method_settings"]["stride"] = bad
    for name in ("method", "model", "engine", "stderr_groups", "tokenizer"):
        manifest[name] = f"{name}{bad}"
    del manifest["seal"]
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(sealed(manifest)))
    for arguments in (["show", tmp_path / "run"], ["show", tmp_path / "run", "--json"]):
        outcome = command(*arguments)
        assert "\x1b" not in outcome.out + outcome.err
        if "--json" not in arguments:
            assert "\x9b" not in outcome.out + outcome.err
