"""scoremode card: stored runs in every dialect, into a README or as files, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.reports.card import MARKERS
from tests.command_line import Command, Refused

TEXTS = ["one two three", "four five six", "seven eight", "nine ten", "eleven twelve", "some more"]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of ``compare --out``: a baseline and one candidate."""
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    sm.compare("table:uniform", "table:uniform", corpus=str(corpus), out=tmp_path / "kept")
    return tmp_path / "kept"


def test_a_readme_changes_between_its_markers_only(command: Command, kept: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{MARKERS[0]}\n{MARKERS[1]}\nrest")
    assert command("card", kept, "--write", readme).out == f"{readme} now has these results\n"
    assert command("card", kept, "--write", readme).out == f"{readme} already has these results\n"
    assert readme.read_text().startswith(f"# Title\n{MARKERS[0]}\n| model |")
    assert readme.read_text().endswith(f"\n{MARKERS[1]}\nrest")


def test_one_json_per_candidate(command: Command, kept: Path, tmp_path: Path) -> None:
    outcome = command("card", kept, "--dialect", "json", "--out", tmp_path / "published")
    (file,) = (tmp_path / "published").iterdir()
    assert outcome.out == f"written to {file}\n"
    found = json.loads(file.read_text())
    assert (found["verdict"], found["for_people"]["ppl_candidate"]) == ("no difference found", "256.0")
    assert str(tmp_path) not in file.read_text()
    assert json.loads(command("card", kept, "--json").out) == [found]


def test_mistakes_are_one_line(refused: Refused, kept: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.md"
    plain.write_text("# Title\n")
    assert MARKERS[0] in refused("card", kept, "--write", plain)
    assert plain.read_text() == "# Title\n"
    assert "there is no dialect 'exl'; did you mean 'exl3'" in refused("card", kept, "--dialect", "exl")
    assert "give --out DIR" in refused("card", kept, "--dialect", "json", "--write", plain)
    assert "--benchmark org/dataset" in refused("card", kept, "--dialect", "eval-results")
    assert "is not a folder of compare --out" in refused("card", tmp_path / "nowhere")
    assert "is one run" in refused("card", kept / "baseline")
