"""The examples of tasks run as they stand: the notebook cell by cell, and the release gate by its exit code."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

from tests.studies.tasks.logs import drawn, write_log
from tests.studies.tasks.tasks import only_own_tasks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_the_notebook_runs_and_writes_its_report(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKS_MODEL", str(tiny))
    monkeypatch.setenv("TASKS_WORK", str(tmp_path / "work"))
    monkeypatch.setenv("TASKS_EXAMPLES", str(EXAMPLES))
    notebook = json.loads((EXAMPLES / "tasks.ipynb").read_text())
    names: dict[str, object] = {}
    with only_own_tasks():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                exec(compile("".join(cell["source"]), "tasks.ipynb", "exec"), names)
    shown = capsys.readouterr().out
    assert "own_swag" in shown
    assert "recovery" in shown
    assert "Documents that flipped" in (tmp_path / "work" / "tasks.html").read_text()


def test_the_release_gate_fails_a_release_that_has_surely_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "gate.html"
    logs = write_log(tmp_path / "a", drawn(1)), write_log(tmp_path / "b", drawn(2), model="q4")

    def ended(*more: object) -> int:
        monkeypatch.setattr(sys, "argv", ["release_gate.py", *map(str, more)])
        with pytest.raises(SystemExit) as ends:
            runpy.run_path(str(EXAMPLES / "release_gate.py"), run_name="__main__")
        return int(str(ends.value.code))

    assert ended(*logs, "--recovery", "0.01", "--report", report) == 0
    assert "all" in capsys.readouterr().out
    assert report.exists()
    assert ended(*logs, "--recovery", "9") == 1
    assert "surely below 9" in capsys.readouterr().err
    few = write_log(tmp_path / "few", drawn(1, documents=2))
    assert ended(few, few) == 2  # four documents have no bounds
    assert "at least five" in capsys.readouterr().err
