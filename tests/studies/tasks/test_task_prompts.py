"""The questions of tasks as prompts for rollouts, and their answers as a corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

import scoremode as sm
from scoremode.errors import InputError, UnknownArgumentError
from tests.command_line import Command
from tests.studies.tasks.tasks import CHOICES, LAST_WORDS, log_of, write_tasks

Logged = Callable[..., Path]


@pytest.fixture
def logged(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Logged:
    """What lm-eval's own model ``dummy`` logs for some tasks."""
    from lm_eval.models.dummy import DummyLM

    monkeypatch.setattr(DummyLM, "tokenizer", None)  # it would ask the hub for one, to log its end token
    tasks = write_tasks(tmp_path_factory.mktemp("tasks"))

    def log(names: str, *more: str) -> Path:
        return log_of(tmp_path_factory.mktemp("log"), "a=b", names.split(","), tasks, "--model", "dummy", *more)

    return log


def test_questions_and_right_answers_of_every_kind_of_task(logged: Logged) -> None:
    chosen = sm.task_prompts(logged("own_choice"))
    assert [row.content for row in chosen.rows] == [row["question"] for row in CHOICES]
    assert [row.answer for row in chosen.rows] == [" " + row["choices"][row["answer"]] for row in CHOICES]
    assert chosen.name == "task:own_choice"
    words = sm.task_prompts(logged("own_last_word", "--limit", "2"))
    assert [str(row.content) + str(row.answer) for row in words.rows] == [row["text"] for row in LAST_WORDS[:2]]
    asked = sm.task_prompts(logged("own_writing", "--limit", "1"), apply_chat_template=True)
    assert asked.rows[0].content == [{"role": "user", "content": LAST_WORDS[0]["text"]}]
    assert asked.rows[0].answer == "."
    with pytest.raises(InputError, match="no questions of text"):
        sm.task_prompts(logged("own_rolling"))


def test_rollouts_of_a_task_and_its_answers_as_a_corpus(logged: Logged, tmp_path: Path, command: Command) -> None:
    log = logged("own_writing,own_choice", "--limit", "2")
    asked = ("rollouts", "table:uniform", "--prompts", f"task:{log}", "--max-tokens", "3")
    found = command(*asked, "--out", tmp_path / "w", "--json").json
    assert (found["prompts"], found["prompts_file"]) == (4, "task:own_choice,own_writing")
    assert any("questions by lm-eval" in note for note in found["notes"])
    scored = command("ppl", "table:uniform", "--corpus", f"answers:{tmp_path / 'w'}", "--json").json
    answers = [" .", " .", *(" " + row["choices"][row["answer"]] for row in CHOICES[:2])]
    assert scored["targets"] == sum(len(answer.encode()) for answer in answers)
    given = ("--prompt", "a", "--apply-chat-template", "--out", tmp_path / "x")
    outcome = command("rollouts", "table:uniform", *given)
    assert (outcome.code, "--apply-chat-template is about tasks" in outcome.err) == (2, True)


def test_the_names_of_tasks_and_arguments_of_before_say_what_to_type(command: Command, tmp_path: Path) -> None:
    outcome = command("rollouts", "table:uniform", "--prompts", "task:gsm8k", "--out", tmp_path / "x")
    assert (outcome.code, "run scoremode lm-eval --model dummy --tasks" in outcome.err) == (2, True)
    with pytest.raises(UnknownArgumentError, match="num_fewshot") as refused:
        sm.task_prompts("gsm8k", num_fewshot=0)
    assert "--model dummy" in refused.value.fix
