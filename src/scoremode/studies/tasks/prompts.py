"""The questions of tasks as prompts for rollouts, with the answers that the tasks know to be right.

lm-eval makes the questions: they are read from what it logged. Its model ``dummy`` answers them at no cost.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoremode.core.arguments import path_text, require_flag
from scoremode.core.text.prompts import Prompt, Prompts, PromptsKind
from scoremode.core.verbs.progress import Progress
from scoremode.errors import InputError, UnknownArgumentError

if TYPE_CHECKING:
    from scoremode.studies.tasks.logs import TaskDocument

RUN = (
    "run scoremode lm-eval --model dummy --tasks TASK,… --output_path DIR --log_samples, with --limit, --num_fewshot "
    "and --include_path as you like, then give --prompts task:DIR"
)


def task_prompts(
    log: str | Path, *, apply_chat_template: bool = False, progress: Progress | None = None, **others: Any
) -> Prompts:
    """Returns the questions of lm-eval's tasks as prompts for ``sm.rollouts``, tasks that generate text included.

    ``log`` is a folder that lm-eval wrote with ``--log_samples``, whatever model it ran. The questions have the
    few-shot examples and the words of the task. With ``apply_chat_template`` each is a message of a user. The answer is
    the task's own: what follows the question in a few-shot example, or the right choice.

    >>> import scoremode as sm
    >>> prompts = sm.task_prompts("logs/dummy", apply_chat_template=True)                         # doctest: +SKIP
    >>> written = sm.rollouts("org/model", prompts, temperature=1, samples=4)                     # doctest: +SKIP
    """
    from scoremode.studies.tasks.logs import part, read_log

    del progress  # nothing here takes long
    for name in others:
        raise UnknownArgumentError(f"{name} is no argument of task_prompts, which reads logs of lm-eval", fix=RUN)
    require_flag("apply_chat_template", apply_chat_template)
    name = path_text("a folder that lm-eval wrote", log)
    if not name or not Path(name).expanduser().exists():
        raise InputError(f"{name or 'an empty name'} is not a folder that lm-eval wrote", fix=RUN)
    found = read_log(name)
    for task, results in found.results.items():
        if part(results, "configs", task).get("output_type") == "loglikelihood_rolling":
            raise InputError(f"the task {task} has no questions of text", fix="name another task")
    rows = [
        _prompt(task.name, document, as_chat=apply_chat_template)
        for task in found.tasks.values()
        for document in task.documents
    ]
    listed = json.dumps([[row.content, row.answer] for row in rows], sort_keys=True)
    shots = ", ".join(f"{task.name} with {task.shots}" for task in found.tasks.values())
    version = found.last.get("lm_eval_version", "of an unknown version")
    notes = (f"questions by lm-eval {version}, few-shot examples: {shots}", *found.notes)
    digest = hashlib.sha256(listed.encode()).hexdigest()
    return Prompts(tuple(rows), f"task:{','.join(found.tasks)}", digest, notes)


def _prompt(task: str, document: TaskDocument, *, as_chat: bool) -> Prompt:
    question, answer = document.pairs[0][0], document.answer
    if any(context != question for context, _ in document.pairs):
        raise InputError(f"the task {task} asks for the question of an answer", fix="name another task")
    if document.gold:
        answer = document.pairs[document.gold[0]][1]
    if not as_chat:
        return Prompt(question, answer)
    return Prompt([{"role": "user", "content": question}], None if answer is None else answer.lstrip() or None)


QUESTIONS = PromptsKind(
    prefix="task:",
    summary="task:DIR: questions that lm-eval logged",
    read=task_prompts,
    flags={"--apply-chat-template": "ask a task's questions as messages of a user"},
    gone=dict.fromkeys(("--limit", "--num-fewshot", "--include-path", "--task-data"), RUN),
)
