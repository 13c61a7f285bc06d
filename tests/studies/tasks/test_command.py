"""scoremode tasks on the command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from scoremode.cli.main import main
from tests.studies.tasks.logs import drawn, write_log

TASKS = "arc_easy,winogrande"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("logs")
    logs = write_log(folder / "a", drawn(1)), write_log(folder / "b", drawn(2), model="org/model-q4")
    return ["tasks", *map(str, logs)]


def test_the_table_says_what_a_reader_must_know(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    for needed in ("arc_easy", "winogrande", "all", "recovery", "lost", "gained", "acc_norm", "±", "McNemar"):
        assert needed in shown


def test_json_has_every_number_and_every_flip(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (candidate,) = found["candidates"]
    rows = {row["name"]: row for row in candidate["rows"]}
    assert list(rows) == ["arc_easy", "winogrande", "all"]
    flipped = rows["all"]["lost_documents"] + rows["all"]["gained_documents"]
    assert len(candidate["flipped"]) == flipped > 0
    assert sum(candidate["weights"].values()) == pytest.approx(1)
    mean = (rows["arc_easy"]["accuracy_candidate"] + rows["winogrande"]["accuracy_candidate"]) / 2
    assert rows["all"]["accuracy_candidate"] == pytest.approx(mean)
    assert found["settings"]["lm_eval"]


def test_a_model_card_gets_a_table_and_an_index(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--markdown"]) == 0
    table = capsys.readouterr().out
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "Command: `scoremode" in table
    assert main([*words, "--model-index"]) == 0
    index = yaml.safe_load(capsys.readouterr().out)["model-index"][0]
    assert [result["dataset"]["type"] for result in index["results"]] == TASKS.split(",")
    assert {metric["type"] for metric in index["results"][0]["metrics"]} == {"acc", "acc_norm", "recovery"}


@pytest.mark.parametrize(
    ("rule", "code", "line"),
    [
        ("recovery < 5", 1, "recovery is"),
        ("recovery < 0.0001 surely", 0, ""),
        ("arc_easy.flips >= 0", 1, "arc_easy: flips is"),
        ("winogrande.mcnemar < 0", 0, ""),
        ("winogrande.acc_norm_recovery < 1", 1, "not all of the tasks have it"),
        ("piqa.recovery < 1", 2, "'piqa' is not compared here"),
        ("mcnemar < 0.01 surely", 2, "has no error"),
    ],
)
def test_rules_fail_by_their_exit_code(
    rule: str, code: int, line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--fail-if", rule]) == code
    assert line in capsys.readouterr().err


def test_the_metric_of_recovery_can_be_chosen(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--metric", "acc", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"][0]["rows"]
    assert {row["metric"] for row in rows} == {"acc"}
    assert rows[0]["recovery"] == rows[0]["acc_recovery"]
    assert main([*words, "--metric", "acc_norm"]) == 0
    assert re.search(r"has no acc_norm, so recovery is\s+about acc", capsys.readouterr().out)
    assert main([*words, "--metric", "f1"]) == 2
    assert "no task here has the metric 'f1'" in capsys.readouterr().err
