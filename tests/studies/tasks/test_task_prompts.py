"""The questions of tasks as prompts for rollouts, and their answers as a corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

import scoremode as sm
from scoremode.errors import InputError
from tests.command_line import Command
from tests.studies.tasks.tasks import CHOICES, LAST_WORDS, only_own_tasks, write_tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_questions_and_right_answers_of_every_kind_of_task(tasks: Path) -> None:
    chosen = sm.task_prompts("own_choice", include_path=tasks)
    assert [row.content for row in chosen.rows] == [row["question"] for row in CHOICES]
    assert [row.answer for row in chosen.rows] == [" " + row["choices"][row["answer"]] for row in CHOICES]
    assert chosen.name == "task:own_choice"
    words = sm.task_prompts("own_last_word", include_path=tasks, limit=2)
    assert [str(row.content) + str(row.answer) for row in words.rows] == [row["text"] for row in LAST_WORDS[:2]]
    asked = sm.task_prompts("own_writing", include_path=tasks, limit=1, apply_chat_template=True)
    assert asked.rows[0].content == [{"role": "user", "content": LAST_WORDS[0]["text"]}]
    assert asked.rows[0].answer == "."
    with pytest.raises(InputError, match="no questions of text"):
        sm.task_prompts("own_rolling", include_path=tasks)


def test_rollouts_of_a_task_and_its_answers_as_a_corpus(tasks: Path, tmp_path: Path, command: Command) -> None:
    where = ("--include-path", tasks)
    asked = ("rollouts", "table:uniform", "--prompts", "task:own_writing,own_choice", "--max-tokens", "3")
    found = command(*asked, *where, "--limit", "2", "--num-fewshot", "0", "--out", tmp_path / "w", "--json").json
    assert (found["prompts"], found["prompts_file"]) == (4, "task:own_writing,own_choice")
    assert any("questions by lm-eval" in note for note in found["notes"])
    scored = command("ppl", "table:uniform", "--corpus", f"answers:{tmp_path / 'w'}", "--json").json
    answers = [" .", " .", *(" " + row["choices"][row["answer"]] for row in CHOICES[:2])]
    assert scored["targets"] == sum(len(answer.encode()) for answer in answers)
    outcome = command("rollouts", "table:uniform", "--prompt", "a", "--limit", "2", "--out", tmp_path / "x")
    assert (outcome.code, "--limit is about tasks" in outcome.err) == (2, True)
    with only_own_tasks():
        outcome = command("rollouts", "table:uniform", "--prompts", "task:nothing_like_it", "--out", tmp_path / "x")
    assert (outcome.code, "no task 'nothing_like_it'" in outcome.err) == (2, True)
