"""The examples of tasks run as they stand: the notebook cell by cell, and the release gate by its exit code."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

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


def test_the_release_gate_fails_a_release_that_has_surely_lost(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, report = write_rows(tmp_path / "rows"), tmp_path / "gate.html"
    rounded = rounded_copy(tiny, tmp_path)
    words = ["release_gate.py", str(tiny), str(rounded), "--tasks", "arc_easy,winogrande", "--task-data", str(rows)]

    def ended(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as ends:
            runpy.run_path(str(EXAMPLES / "release_gate.py"), run_name="__main__")
        return int(str(ends.value.code))

    assert ended("--recovery", "0.01", "--report", str(report)) == 0
    assert "all" in capsys.readouterr().out
    assert report.exists()
    assert ended("--recovery", "9") == 1
    assert "surely below 9" in capsys.readouterr().err
    assert ended("--limit", "2") == 2  # four documents have no bounds
    assert "at least five" in capsys.readouterr().err
