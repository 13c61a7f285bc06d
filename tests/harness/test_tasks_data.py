"""Local data of tasks: which file is which split, and every defect in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

import scoremode as sm
from scoremode.disk.folders import TASK_INDEX, cache_folder
from scoremode.errors import InputError, OptionError
from scoremode.harness import loading
from scoremode.harness.loading import TaskSelection, load_tasks
from tests.harness.task_rows import write_rows

GOOD = json.dumps({"question": "q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"})


def load(folder: Path, name: str = "arc_easy", **more: Any) -> Any:
    return load_tasks(TaskSelection((name,), task_data=folder, **more))


def put(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def test_the_test_split_is_evaluated_where_a_task_has_one(tmp_path: Path) -> None:
    found = load(put(tmp_path, arc_easy_test=GOOD, arc_easy_validation=f"{GOOD}\n{GOOD}"))
    assert len(found.tasks["arc_easy"].eval_docs) == 1
    assert found.notes == []
    assert set(found.files) == {"arc_easy_test.jsonl", "arc_easy_validation.jsonl"}


def test_validation_is_taken_for_a_missing_test_split_and_that_is_said(tmp_path: Path) -> None:
    found = load(put(tmp_path, arc_easy_validation=GOOD))
    assert len(found.tasks["arc_easy"].eval_docs) == 1
    assert "evaluated on validation, because" in found.notes[0]
    asked = sm.tasks("table:uniform", "table:uniform", tasks="arc_easy", task_data=tmp_path)[0]
    assert found.notes[0] in asked.notes


def test_training_data_are_never_evaluated(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no data of the task arc_easy"):
        load(put(tmp_path, arc_easy_train=GOOD))


def test_a_file_without_a_split_is_the_one_that_is_evaluated(tmp_path: Path) -> None:
    assert len(load(put(tmp_path, arc_easy=GOOD)).tasks["arc_easy"].eval_docs) == 1


def test_a_file_may_have_the_name_of_the_datasets_configuration(tmp_path: Path) -> None:
    assert len(load(put(tmp_path, **{"ARC-Easy_test_part": GOOD})).tasks["arc_easy"].eval_docs) == 1


def test_two_files_for_one_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"several files .*: arc_easy_test\.jsonl, arc_easy_test_2\.jsonl"):
        load(put(tmp_path, arc_easy_test=GOOD, arc_easy_test_2=GOOD))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("{", "line 1 is not JSON"),
        (f"{GOOD}\n[1]", "line 2 is not a JSON object"),
        (f"{GOOD}\nnull", "line 2 is not a JSON object"),
        ('{"question": NaN}', "line 1 is not JSON"),
        ('{"question": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
        ('{"q": 1}\n{"q": "a"}', "do not fit together"),
        ('{"other": "field"}', "check the fields of its rows|cannot make"),
        (json.dumps({"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}), "1 choices"),
        (GOOD.replace('"A"}', '"Z"}'), "cannot make"),
        (
            f'{GOOD}\n{{"choices": {{"text": ["a", "b"], "label": ["A", "B"]}}, "answerKey": "A"}}',
            "no field 'question'",
        ),
        (f'{GOOD}\n{GOOD[:-1]}, "hint": "h"}}', "line 2 has a field 'hint'"),
    ],
)
def test_rows_that_are_not_rows_are_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    put(tmp_path, arc_easy_test=text)
    with pytest.raises(InputError, match=words) as refused:
        sm.tasks("table:uniform", "table:uniform", tasks="arc_easy", task_data=tmp_path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "arc_easy_test.jsonl").write_bytes(b'{"question": "\xff\xfe"}')
    with pytest.raises(InputError, match="not UTF-8"):
        load(tmp_path)


def test_a_pipe_or_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "arc_easy_test.jsonl")
    with pytest.raises(InputError, match="is not a file"):
        load(tmp_path)


def hellaswag(folder: Path, *labels: Any) -> Path:
    rows = [
        {"activity_label": "a", "ctx_a": "a.", "ctx_b": "b", "endings": ["c.", "d.", "ee."], "label": i} for i in labels
    ]
    return put(folder, hellaswag_validation="\n".join(map(json.dumps, rows)))


def test_labels_that_are_hidden_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no document of the task hellaswag names one of its choices"):
        sm.tasks("table:uniform", "table:uniform", tasks="hellaswag", task_data=hellaswag(tmp_path, "-1", "-1"))


def test_documents_without_a_right_choice_are_counted(tmp_path: Path) -> None:
    data = hellaswag(tmp_path, "0", "9", "0", "-1", "0")
    found = sm.tasks("table:uniform", "table:uniform", tasks="hellaswag", task_data=data)[0]
    assert any("2 of 5 documents name none of their choices as right; they count as wrong" in n for n in found.notes)
    row = found.row("hellaswag")
    assert row["margin_shift"] is None
    assert row["acc_baseline"] == pytest.approx(3 / 5)  # the shortest of the choices is the likeliest, and is the first
    assert [document.gold for document in found.tasks[0].documents] == [(0,), None, (0,), None, (0,)]


def test_a_metric_that_no_task_has_is_refused(tmp_path: Path) -> None:
    put(tmp_path, arc_easy_test=GOOD)
    with pytest.raises(OptionError, match="no task here has the metric 'acc_nrom'; did you mean 'acc_norm'"):
        sm.tasks("table:uniform", "table:uniform", tasks="arc_easy", task_data=tmp_path, metric="acc_nrom")


def test_few_shot_examples_come_from_the_split_that_the_task_names(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    found = load(rows, num_fewshot=3)
    assert found.shots("arc_easy") == 3
    (rows / "arc_easy_train.jsonl").unlink()
    with pytest.raises(InputError, match="come from its split train"):
        load(rows, num_fewshot=3)


def test_a_limit_is_said_and_kept(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    found = sm.tasks("table:uniform", "table:uniform", tasks=["winogrande"], task_data=rows, limit=6)[0]
    assert found.overall["documents"] == 6
    assert "only the first 6 documents of each task (--limit)" in found.notes
    assert found.settings["limit"] == 6
    assert found.settings["seeds"]["fewshot"] == 1234


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_tags_and_patterns_stand_for_their_tasks(tmp_path: Path) -> None:
    put(tmp_path, arc_easy_test=GOOD, arc_challenge_test=GOOD)
    assert load(tmp_path, "ai2_arc").top == ("arc_challenge", "arc_easy")
    assert load(tmp_path, "arc_eas?").top == ("arc_easy",)
    with pytest.raises(OptionError, match="given twice"):
        load_tasks(TaskSelection(("arc_easy", "arc_eas[y]"), task_data=tmp_path))


def test_the_remembered_index_is_that_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is damaged, or of another version, is made again."""
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    first = loading.task_manager().task_index
    path = cache_folder() / TASK_INDEX
    stored = json.loads(path.read_text())
    again = loading.task_manager().task_index
    assert {name: (e.kind, e.yaml_path, e.tags) for name, e in first.items()} == {
        name: (e.kind, e.yaml_path, e.tags) for name, e in again.items()
    }
    assert len(again) > 10_000
    root = next(iter(e.yaml_path for e in again.values() if e.yaml_path)).parents[0]
    assert loading._remembered(path, "another", root) is None
    damages: list[Any] = [
        {**stored, "entries": {"a": ["TASK", "../../x.yaml", []]}},
        {**stored, "entries": {"a": ["NO"]}},
        [],
    ]
    for damage in damages:
        broken = tmp_path / "broken.json"
        broken.write_text(json.dumps(damage))
        assert loading._remembered(broken, stored["stamp"], root) is None
