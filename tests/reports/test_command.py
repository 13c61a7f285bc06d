"""scoremode report -o and compare --report: where a page may be written, told before anything is scored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.disk.manifests import about_sealed_text
from scoremode.reports.html.page import render
from tests.command_line import Command, Refused


@pytest.fixture
def run(tmp_path: Path) -> Path:
    sm.ppl("table:uniform", text="some text", out=tmp_path / "run")
    return tmp_path / "run"


def test_a_page_says_at_its_end_what_it_is_about_and_has_a_seal(run: Path) -> None:
    page = render([], runs=[sm.load(run)]).encode()
    assert len(about_sealed_text(page) or ()) == 1
    assert about_sealed_text(page.replace(b"<h1>", b"<h1>Ours: ")) is None


def test_a_page_is_written_and_written_again(command: Command, run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    for _ in range(2):
        outcome = command("report", run, "-o", page)
        assert (outcome.code, outcome.out) == (0, f"written to {page}\n")
    assert about_sealed_text(page.read_bytes())


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_link_is_written_through(command: Command, run: Path, tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    outcome = command("report", run, "-o", tmp_path / "link.html", *flags)
    assert (outcome.code, outcome.err) == (0, "")
    assert (tmp_path / "link.html").is_symlink()
    assert about_sealed_text((tmp_path / "target.html").read_bytes())


@pytest.mark.parametrize("name", ["", "notes.txt", "no/report.html", "run/manifest.json", "."])
def test_a_comparison_says_so_before_it_scores(
    refused: Refused, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    refused("compare", "table:uniform", "table:successor", "--text", "abc", "--out", "kept", "--report", name)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "run"], "nothing was scored"
    sm.load(run)


@pytest.mark.parametrize("name", ["runs/kept/report.html", "runs/kept.html"])
def test_the_report_of_a_comparison_may_lie_beside_its_runs(command: Command, tmp_path: Path, name: str) -> None:
    """In folders that are not there before it scores."""
    arguments = ["compare", "table:uniform", "table:successor", "--text", "abc", "--out", tmp_path / "runs" / "kept"]
    for _ in range(2):
        assert command(*arguments, "--report", tmp_path / name).code == 0
    assert about_sealed_text((tmp_path / name).read_bytes())
