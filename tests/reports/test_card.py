"""scoremode card: stored runs in every dialect, into a README or as files, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.reports.card import MARKERS, run_folders
from tests.command_line import Command, Refused
from tests.core.statistics.test_comparison import random_comparison

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


def test_the_folder_of_a_comparison_is_all_of_its_runs_and_nothing_else(kept: Path) -> None:
    other = sm.ppl("table:successor", text="abc", out=kept.parent / "other")
    (kept / "notes").mkdir()
    (kept / "notes.txt").write_text("mine")
    (baseline, *candidates) = run_folders([str(kept)])
    assert baseline == str(kept / "baseline")
    assert [Path(name).parent for name in candidates] == [kept]
    assert all((Path(name) / "manifest.json").is_file() for name in candidates)
    assert run_folders([str(kept), str(other.path)]) == [str(kept), str(other.path)]
    assert run_folders([str(other.path)]) == [str(other.path)]


def test_comparisons_and_folders_do_not_mix(kept: Path) -> None:
    compared = sm.compare("table:uniform", "table:successor", text="any text")
    assert sm.card(*compared).startswith("| model |")  # type: ignore[union-attr]
    for sources in ((), (compared[0], str(kept))):
        with pytest.raises(sm.ScoremodeError, match="a card is made of comparisons, or of folders of runs"):
            sm.card(*sources)


def test_dialects_of_several_candidates() -> None:
    compared = sm.compare("table:uniform", "table:successor", "table:uniform", text="abcdefgh" * 8)
    table = str(sm.card(*compared, dialect="exl3")).splitlines()
    tops = [f"top-{count} agreement" for count in range(1, 6)]
    measures = ["KL divergence (original, quantized)", "KL divergence (quantized, original)", *tops, "perplexity"]
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == ["model", "bpw", *measures]
    assert [line.split("|")[1].strip() for line in table[2:5]] == [
        "table:uniform (original)",
        "table:successor",
        "table:uniform",
    ]
    published = [random_comparison(50), random_comparison(50, seed=1, name="q8")]
    metadata = str(sm.card(*published, dialect="model-index")).splitlines()
    assert metadata[0] == "model-index:"
    assert [line.strip("- ") for line in metadata if "name:" in line and not line.startswith("   ")] == [
        'name: "q4"',
        'name: "q8"',
    ]
