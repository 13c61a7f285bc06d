"""Slices on the page, of comparisons and of runs: their names are escaped."""

from __future__ import annotations

from pathlib import Path

import scoremode as sm
from scoremode.reports.html.page import render
from tests.command_line import Command

TEXT = ("--text", "one <think>hm</think> two")


def test_the_page_shows_slices(command: Command, tmp_path: Path) -> None:
    asked = ("compare", "table:uniform", "table:uniform", *TEXT, "--slice", "thinking=<think>..</think>")
    assert command(*asked, "--report", tmp_path / "page.html").code == 0
    run = sm.ppl("table:uniform", text=TEXT[1], slice="<b>&=<think>..</think>")
    for page in ((tmp_path / "page.html").read_text(), render([], runs=[run])):
        assert "By slice of the text" in page
        assert "<b>&" not in page
