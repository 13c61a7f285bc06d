"""scoremode compare with a reference: it brings its own question."""

from __future__ import annotations

from pathlib import Path

from tests.command_line import Command

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 4


def test_a_reference_brings_its_own_method(command: Command, tiny: Path, tmp_path: Path) -> None:
    asked = ("--text", TEXT, "--method", "gptq", "--context-length", 32)
    assert command("reference", tiny, *asked, "--out", tmp_path / "ref", "--json").code == 0
    outcome = command("compare", tmp_path / "ref", tiny, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["method"] == "gptq"
