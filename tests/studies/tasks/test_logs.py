"""Logs of lm-eval are read strictly: what does not belong together, or is damaged, is one line; numbers by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.errors import InputError
from tests.studies.tasks.logs import CHOICES, TIME, drawn, write_log

ONE = {"made": [[-1.0, -2.0, -9.0], [-1.5, -1.0, -3.0], [-4.0, -2.0, -1.0], [-1.0, -5.0, -6.0], [-2.0, -1.0, -3.0]]}
TWO = {"made": [[-1.0, -3.0, -9.0], [-1.0, -1.5, -3.0], [-1.0, -2.0, -4.0], [-1.0, -5.0, -6.0], [-1.0, -2.0, -3.0]]}


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    return write_log(tmp_path / "a", ONE), write_log(tmp_path / "b", TWO, model="org/q4")


def samples(folder: Path) -> Path:
    (found,) = folder.rglob("samples_*.jsonl")
    return found


def test_every_number_by_hand(logs: tuple[Path, Path]) -> None:
    found = sm.tasks(*logs, metric="acc")[0]
    assert (found.name, found.baseline_name, found.top) == ("org/q4", "org/model", ("made",))
    row = found.row("made")
    gold = [i % 3 for i in range(5)]
    one, two = np.array(ONE["made"]), np.array(TWO["made"])
    right = [(side.argmax(1) == gold).astype(float) for side in (one, two)]
    assert right[0].tolist() == [1, 1, 1, 1, 1]
    assert right[1].tolist() == [1, 0, 0, 1, 0]
    assert (row["acc_baseline"], row["acc_candidate"]) == (1.0, 0.4)
    assert (row["recovery"], row["lost_documents"], row["gained_documents"]) == (0.4, 3, 0)
    assert row["mcnemar"] == 0.25
    assert row["changed"] == pytest.approx(0.6)
    assert [flip.document.number for flip in found.flips()] == [1, 2, 4]
    assert [flip.chosen for flip in found.flips()] == [(1, 0), (2, 0), (1, 0)]
    assert found.tasks[0].documents[0].choices == CHOICES
    assert found.settings["num_fewshot"] == {"made": 0}


def test_what_the_log_lacks_is_not_known(tmp_path: Path) -> None:
    one, two = (write_log(tmp_path / name, log, with_results=False) for name, log in (("a", ONE), ("b", TWO)))
    found = sm.tasks(one, two)[0]
    row = found.row("made")
    assert row["metric"] == "acc_norm"
    assert row["changed"] is not None
    assert found.tasks[0].shots is None
    assert any("results file is missing" in note for note in found.notes)
    assert (found.baseline_name, found.name) == ("a", "b")


def test_choices_that_lm_eval_measured_otherwise_are_not_known(logs: tuple[Path, Path]) -> None:
    for log in logs:  # a choice of no character
        path = samples(log)
        path.write_text(path.read_text().replace('"arg_1": " yes"', '"arg_1": ""'))
    found = sm.tasks(*logs)[0]
    assert (found.row("made")["metric"], found.row("made")["changed"]) == ("acc_norm", None)
    assert any("does not show which choice is the likeliest per character" in note for note in found.notes)


def test_right_choices_that_contradict_lm_eval_are_not_known(logs: tuple[Path, Path]) -> None:
    for log in logs:
        path = samples(log)
        path.write_text(path.read_text().replace('"target": "2"', '"target": "1"'))
    found = sm.tasks(*logs)[0]
    assert (found.row("made")["margin_shift"], found.row("made")["gold_shift"]) == (None, None)
    assert found.row("made")["kl_choices"] is not None
    assert any("does not say which choice is right in 1 of 5" in note for note in found.notes)


def test_the_newest_samples_are_read_and_that_is_said(logs: tuple[Path, Path]) -> None:
    write_log(logs[1], ONE, model="org/q4", time="2027-01-02T03-04-05.000006")
    found = sm.tasks(*logs)[0]
    assert found.overall["recovery"] == 1
    assert any("older samples of made were not read" in note for note in found.notes)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('{"doc_id": 4', '{"doc_id": 7', "1 documents are in the baseline alone, 1 in the candidate"),
        ('{"doc_id": 4', '{"doc_id": 3', "document 3 is there twice"),
        ('{"doc_id": 4', '{"doc_id": "4"', "its doc_id"),
        ('"prompt_hash": "', '"prompt_hash": "0', "document 0 has another prompt in the candidate"),
        ('"doc_hash": "', '"doc_hash": "0', "document 0 has another text in the candidate"),
        ('" no, never"', '" no, ever"', "document 0 has another list of choices in the candidate"),
        ('"arguments"', '"argument"', "it has no 'arguments'"),
        ('[["-9.0"', '[["nan"', "not a number"),
        ('[["-9.0"', '[["x"', "could not convert"),
        ('{"doc_id": 0', "{", "line 1 is not JSON"),
        ('{"doc_id": 0', "[" * 5000, "line 1 is not JSON"),
    ],
)
def test_logs_that_do_not_fit_are_one_line(before: str, after: str, words: str, logs: tuple[Path, Path]) -> None:
    path = samples(logs[1])
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(InputError, match=words) as refused:
        sm.tasks(*logs)
    assert "\n" not in str(refused.value)


def test_a_log_that_was_cut_is_refused(logs: tuple[Path, Path]) -> None:
    path = samples(logs[0])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(InputError, match="has 3 documents, and its results file says 5"):
        sm.tasks(*logs)
    path.write_text("")
    with pytest.raises(InputError, match="is empty"):
        sm.tasks(*logs)


def test_what_is_no_log_of_one_model_is_refused(logs: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match=r"engine is no argument of tasks.*--log_samples"):
        sm.tasks(*logs, engine="vllm")
    with pytest.raises(InputError, match="no candidate"):
        sm.tasks(logs[0])
    write_log(logs[0], ONE, model="org/other")
    with pytest.raises(InputError, match="samples of several models: org__model, org__other"):
        sm.tasks(*logs)
    assert sm.tasks(logs[0] / "org__model", logs[1])[0].name == "org/q4"
    file = samples(logs[1])
    assert sm.tasks(logs[0] / "org__model", file)[0].name == "org/q4"
    file.rename(file.with_name("samples_made.jsonl"))
    with pytest.raises(InputError, match=r"is not named samples_TASK_TIME\.jsonl"):
        sm.tasks(logs[0] / "org__model", logs[1])
    file.with_name("samples_made.jsonl").unlink()
    os.mkfifo(logs[1] / "org__q4" / f"samples_x_{TIME}.jsonl")
    with pytest.raises(InputError, match="is not named"):
        sm.tasks(logs[0] / "org__model", logs[1])


def test_a_task_of_one_side_is_refused_unless_others_are_named(tmp_path: Path) -> None:
    one = write_log(tmp_path / "a", drawn(1))
    two = write_log(tmp_path / "b", drawn(2, tasks=["arc_easy"]), model="q4")
    with pytest.raises(InputError, match=r"b has no samples of the task winogrande; .*give --tasks arc_easy"):
        sm.tasks(one, two)
    assert sm.tasks(one, two, tasks="arc_easy")[0].overall["documents"] == 24
    with pytest.raises(InputError, match="has no task 'arc_esy'; did you mean 'arc_easy'"):
        sm.tasks(one, two, tasks=["arc_esy"])


def test_a_group_whose_weights_the_log_does_not_show_counts_its_tasks_alike(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a", {**ONE, **drawn(1, tasks=["other"])}, group_subtasks={"loose": ["made", "other"]})
    (compared,) = sm.tasks(log, log)
    assert compared.groups["loose"] == {"made": 0.5, "other": 0.5}
    assert any(note.startswith("loose: the log does not show the weights") for note in compared.notes)


def test_a_group_that_contains_itself_is_refused(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a", ONE, group_subtasks={"a": ["b", "made"], "b": ["a"]})
    with pytest.raises(InputError, match="contains itself"):
        sm.tasks(log, log)
