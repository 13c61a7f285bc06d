"""``scoremode lm-eval``: the harness's own command line, with our model in its registry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from scoremode.cli.main import main
from scoremode.core.installation import pip_install
from scoremode.studies.tasks import lm_eval_command
from tests import forked
from tests.studies.tasks import tasks
from tests.studies.tasks.tasks import write_tasks

HAS_HARNESS = find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="needs lm-eval")


@pytest.fixture
def only_own_tasks() -> Iterator[None]:
    with tasks.only_own_tasks():
        yield


@needs_harness
@pytest.mark.usefixtures("only_own_tasks")
def test_a_task_with_generated_answers_is_refused_before_a_weight_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tasks(tmp_path / "tasks", ["own_choice", "own_writing"])
    words = ["lm-eval", "--tasks", "own_choice,own_writing", "--include_path", str(folder)]
    assert main([*words, "--model_args", "model=table:uniform"]) == 2
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert last.startswith("scoremode: scoremode scores texts and generates none, which own_writing needs")
    assert "--model hf" in last


@needs_harness
@pytest.mark.usefixtures("only_own_tasks")
def test_a_task_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["lm-eval", "--tasks", "nothing_of_this_name", "--model_args", "model=table:uniform"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    last = shown.strip().split("\n")[-1]
    assert last.startswith("scoremode: ")
    assert "nothing_of_this_name" in last


@needs_harness
def test_the_harness_keeps_its_own_models() -> None:
    """Registering first would hide them: it loads them only while its registry is empty."""
    code = (
        "from scoremode.studies.tasks.lm_eval_command import register\n"
        "register(); register()\n"
        "from lm_eval.api.registry import get_model\n"
        "print(get_model('dummy').__name__, get_model('scoremode').__name__)"
    )
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["DummyLM", "ScoremodeLM"]


@needs_harness
def test_a_model_that_the_user_names_is_left_alone() -> None:
    for words in (["--tasks", "x"], ["run", "--tasks", "x"]):
        assert lm_eval_command.with_model(words) == [*words, "--model", "scoremode"]
    for words in (["--model", "hf"], ["-M", "hf"], ["--model=hf"], ["--config", "run.yaml"], ["ls", "tasks"]):
        assert lm_eval_command.with_model([*words, "--tasks", "x"]) == [*words, "--tasks", "x"]


def test_without_the_harness_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lm_eval_command, "find_spec", lambda name: None)
    assert main(["lm-eval", "--tasks", "x"]) == 2
    assert capsys.readouterr().err == f"scoremode: lm-evaluation-harness is not installed; {pip_install('lm-eval')}\n"


def test_help_is_ours_and_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["lm-eval"], ["lm-eval", "--help"], ["lm-eval", "-h"]):
        assert main(words) == 0
        assert "--model_args" in capsys.readouterr().out


def test_the_entry_point_names_the_class() -> None:
    """For releases of the harness after 0.4.13. An installation from before this was declared has none."""
    found = [point.value for point in entry_points(group="lm_eval.models") if point.name == "scoremode"]
    declared = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert f'scoremode = "{lm_eval_command.TARGET}"' in declared
    assert found in ([], [lm_eval_command.TARGET])
