"""The examples of tasks run as they stand: the notebook cell by cell, and the release gate by its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from tests.harness.task_rows import rounded_copy, write_rows

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_notebook_runs_and_writes_its_report(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKS_MODEL", str(tiny))
    monkeypatch.setenv("TASKS_WORK", str(tmp_path / "work"))
    monkeypatch.setenv("TASKS_EXAMPLES", str(EXAMPLES))
    notebook = json.loads((EXAMPLES / "tasks.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), "tasks.ipynb", "exec"), names)
    shown = capsys.readouterr().out
    assert "hellaswag" in shown
    assert "recovery" in shown
    assert "Documents that flipped" in (tmp_path / "work" / "tasks.html").read_text()


def test_the_release_gate_fails_a_release_that_has_surely_lost(tiny: Path, tmp_path: Path) -> None:
    rows, report = write_rows(tmp_path / "rows"), tmp_path / "gate.html"
    rounded = rounded_copy(tiny, tmp_path)
    command = [
        sys.executable,
        str(EXAMPLES / "release_gate.py"),
        str(tiny),
        str(rounded),
        "--tasks",
        "arc_easy,winogrande",
    ]
    command += ["--task-data", str(rows)]
    passed = subprocess.run(
        [*command, "--recovery", "0.01", "--report", str(report)], capture_output=True, text=True, check=False
    )
    assert passed.returncode == 0, passed.stderr
    assert "all" in passed.stdout
    assert report.exists()
    failed = subprocess.run([*command, "--recovery", "9"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "surely below 9" in failed.stderr
