"""Patterns and folders of candidates, and comparisons in which some of them fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scoremode.core.verbs.compared_models import expand_candidates
from scoremode.engines.llamacpp.small_gguf import Matrix
from scoremode.errors import InputError
from tests.command_line import Command
from tests.gguf_files import gguf_of, require_llamacpp

TEXT = "The quick brown fox jumps over 12345 lazy dogs, and the dog does not mind. " * 6
ASKED = ("--text", TEXT, "--context-length", "48")


@pytest.fixture
def quants(tmp_path: Path) -> Path:
    folder = tmp_path / "quants"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "notes").mkdir()
    for name in ("b", "a", "big-00001-of-00002", "big-00002-of-00002", "mmproj-a"):
        (folder / f"{name}.gguf").write_text("")
    (folder / "README.md").write_text("")
    return folder


def names(found: list[str]) -> list[str]:
    return [Path(name).name for name in found]


def test_a_pattern_names_models(quants: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = ["a.gguf", "b.gguf", "big-00001-of-00002.gguf"]
    assert names(expand_candidates([str(quants / "*.gguf")])) == expected
    assert "mmproj-a.gguf is left out: it is a projector of images" in caplog.text
    by_shell = [str(path) for path in sorted(quants.glob("*.gguf"))]
    assert names(expand_candidates(by_shell)) == expected
    assert names(expand_candidates([str(quants / "*.gguf"), by_shell[0]])) == expected
    assert names(expand_candidates([str(quants / "*")])) == [*expected, "hf"]
    assert "of the files that match" in caplog.text


def test_a_folder_of_models_names_them(quants: Path) -> None:
    assert names(expand_candidates([quants])) == ["a.gguf", "b.gguf", "big-00001-of-00002.gguf", "hf"]
    assert expand_candidates([str(quants / "hf"), str(quants / "notes")]) == [str(quants / "hf"), str(quants / "notes")]
    one = quants / "notes"
    (one / "only.gguf").write_text("")
    assert expand_candidates([str(one)]) == [str(one)]  # the folder of one model, as before


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    given = ["org/model", "table:uniform", "s3://bucket/run", "hf://datasets/me/run", "http://host/v1"]
    assert expand_candidates(given) == given
    with pytest.raises(InputError, match="two candidates have the same name; give each of them once"):
        expand_candidates([*given, given[0]])
    with pytest.raises(InputError, match=r"no model or run matches the pattern .*\*\.gguf"):
        expand_candidates([str(tmp_path / "*.gguf")])
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match="no model or run matches"):
        expand_candidates([str(tmp_path / "*.txt")])


def scaled_by(factor: float) -> Callable[[str, Matrix], Matrix]:
    return lambda _, matrix: matrix * factor


def test_many_files_one_of_them_damaged(tiny: Path, tmp_path: Path, command: Command) -> None:
    """The others are finished and shown; the failed one is named last; the same command scores only that one."""
    require_llamacpp()
    folder = tmp_path / "quants"
    folder.mkdir()
    for number in range(4):
        gguf_of(tiny, folder / f"q{number}.gguf", weights=scaled_by(1 + number / 1000))
    damaged = folder / "q2.gguf"
    good = damaged.read_bytes()
    damaged.write_bytes(good[: len(good) // 2])
    assert command("reference", str(tiny), *ASKED, "--out", str(tmp_path / "ref")).code == 0
    asked = ("compare", str(tmp_path / "ref"), str(folder / "*.gguf"))
    outcome = command(*asked)
    assert outcome.code == 2
    assert [f"q{n}.gguf" in outcome.out for n in range(4)] == [True, True, False, True]
    first, last = outcome.err.splitlines()[-2:]
    assert first.startswith(f"scoremode: {damaged} failed: ")
    assert "truncated" in first
    assert last == "scoremode: 1 candidate was not scored; the others are kept: the same command scores only these"
    as_json = command(*asked, "--json", "--fail-if", "kl_mean > 0")
    assert as_json.code == 2  # a rule holds too, but not everything was measured
    told = json.loads(as_json.out)
    assert ([one["name"] for one in told["failed"]], len(told["candidates"])) == ([str(damaged)], 3)
    damaged.write_bytes(good)
    repaired = command("compare", str(tmp_path / "ref"), str(folder), "--fail-if", "kl_mean > 1")
    assert (repaired.code, repaired.out.count(".gguf") >= 4) == (0, True)


def test_if_all_fail_there_is_no_table(tmp_path: Path, command: Command) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    assert command("reference", "table:uniform", "--text", TEXT, "--out", str(tmp_path / "ref")).code == 0
    outcome = command("compare", str(tmp_path / "ref"), str(tmp_path / "*.gguf"))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count(" failed: ") == 2
