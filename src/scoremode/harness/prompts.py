"""The questions of tasks as prompts for rollouts, with the answers that the tasks know to be right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scoremode.arguments import require_flag
from scoremode.errors import InputError
from scoremode.harness.documents import TaskDocument, build_documents
from scoremode.harness.loading import LoadedTasks, load_tasks, task_selection
from scoremode.text.prompts import Prompt, Prompts
from scoremode.verbs.progress import Progress


def task_prompts(
    tasks: str | Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    apply_chat_template: bool = False,
    task_data: str | Path | None = None,
    include_path: str | Path | Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> Prompts:
    """Returns the questions of lm-eval's tasks as prompts for ``sm.rollouts``, tasks that generate text included.

    The questions have the few-shot examples and the words of the task. With ``apply_chat_template`` each is a message
    of a user. The answer is the task's own: what follows the question in a few-shot example, or the right choice.

    >>> import scoremode as sm
    >>> prompts = sm.task_prompts("gsm8k", num_fewshot=0, limit=100, apply_chat_template=True)    # doctest: +SKIP
    >>> written = sm.rollouts("org/model", prompts, temperature=1, samples=4)                     # doctest: +SKIP
    """
    require_flag("apply_chat_template", apply_chat_template)
    chosen = task_selection(tasks, num_fewshot, limit, task_data, include_path, generates=True)
    loaded = load_tasks(chosen, progress)
    rows = [row for name in loaded.tasks for row in _rows(loaded, name, as_chat=apply_chat_template)]
    listed = json.dumps([[row.content, row.answer] for row in rows], sort_keys=True)
    shots = ", ".join(f"{name} with {loaded.shots(name)}" for name in loaded.tasks)
    notes = (*loaded.notes, f"questions by lm-eval {loaded.version}, few-shot examples: {shots}")
    name = f"task:{','.join(chosen.names)}"
    return Prompts(tuple(rows), name, hashlib.sha256(listed.encode()).hexdigest(), notes)


def _rows(loaded: LoadedTasks, name: str, *, as_chat: bool) -> Iterator[Prompt]:
    task = loaded.tasks[name]
    for document in build_documents(loaded, name):
        if document.contexts_differ:
            raise InputError(f"the task {name} asks for the question of an answer", fix="name another task")
        question, answer = document.pairs[0][0], _answer(task, document)
        if as_chat:
            yield Prompt([{"role": "user", "content": question}], None if answer is None else answer.lstrip() or None)
        else:
            yield Prompt(question, answer)


def _answer(task: Any, document: TaskDocument) -> str | None:
    """Returns what should follow the question; None if the task does not say it as a text."""
    if task.OUTPUT_TYPE != "generate_until":
        return None if document.gold is None else document.pairs[document.gold[0]][1]
    target = task.doc_to_target(document.instances[0].doc)
    if isinstance(target, list) and target:
        target = target[0]
    return str(task.config.target_delimiter) + target if isinstance(target, str) and target else None
