"""Folders that come off: without one, its verb, its flags and its names are gone, and everything else works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import HOUSE

ASKED = '["compare", "table:uniform", "table:successor", "--text", "any text"]'


@pytest.mark.parametrize(
    ("folder", "code"),
    [
        (
            "reports/html",
            f"""
assert not hasattr(sm, "report") and sm.ppl("table:uniform", text="abc")._repr_html_() is None
assert main(["report", "run", "-o", "page.html"]) == main({ASKED} + ["--report", "page.html"]) == 2
assert main({ASKED} + ["--markdown"]) == main(["compare", "--help"]) == 0""",
        ),
        (
            "studies/tasks",
            f"""
assert not hasattr(sm, "tasks") and not hasattr(sm, "task_prompts")
assert main(["tasks", "a", "b"]) == main(["rollouts", "table:uniform", "--limit", "1"]) == 2
assert main({ASKED} + ["--report", "page.html"]) == main(["rollouts", "table:uniform", "--help"]) == 0
assert "<table" in sm.ppl("table:uniform", text="abc")._repr_html_()""",
        ),
    ],
)
def test_the_others_work_without(folder: str, code: str, tmp_path: Path) -> None:
    shutil.copytree(HOUSE, tmp_path / "scoremode", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "scoremode" / folder)
    started = f"""
import scoremode as sm
from scoremode.cli.main import main as command
def main(words):
    try:
        return command(words)
    except SystemExit as ended:
        return ended.code or 0
assert sm.__file__.startswith({str(tmp_path)!r}) and main(["--help"]) == 0
{code}"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SCOREMODE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", started], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
