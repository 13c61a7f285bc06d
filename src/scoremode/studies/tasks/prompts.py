"""The questions of tasks as prompts for rollouts, with the answers that the tasks know to be right."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import hashlib
import io
import json
import logging
import random
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scoremode.core.arguments import require_flag, whole_number
from scoremode.core.installation import pip_install
from scoremode.core.text.prompts import Prompt, Prompts, PromptsKind
from scoremode.core.verbs.progress import Progress, announce
from scoremode.errors import InputError, OptionError

KINDS = ("generate_until", "multiple_choice", "loglikelihood")
LOCAL = "give --include-path a folder with a YAML file that names your rows: docs/rollouts.md shows one"


def task_prompts(
    tasks: str | Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    apply_chat_template: bool = False,
    task_data: None = None,
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
    if task_data is not None:
        raise OptionError("--task-data went away", fix=LOCAL)
    names = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks)]
    if not names or not all(names):
        raise OptionError("no task was named", fix="give --prompts task:arc_easy")
    least = {"num_fewshot": (0, num_fewshot), "limit": (1, limit)}
    for name, (smallest, given) in least.items():
        if (number := whole_number(name, given)) is not None and number < smallest:
            raise OptionError(f"--{name.replace('_', '-')} {number} is too small", fix=f"give {smallest} or more")
    try:
        installed = version("lm_eval")
    except PackageNotFoundError:
        what = "tasks are defined by lm-evaluation-harness, which is not installed"
        raise InputError(what, fix=pip_install("lm-eval")) from None
    announce(progress, "loading the tasks and their data")
    include = [include_path] if isinstance(include_path, str | Path) else include_path
    with _as_in_lm_eval():
        loaded = _load(names, [str(folder) for folder in include])
        for task in loaded.values():
            _set_shots(task, num_fewshot)
        rows = [row for name, task in loaded.items() for row in _rows(name, task, limit, as_chat=apply_chat_template)]
    listed = json.dumps([[row.content, row.answer] for row in rows], sort_keys=True)
    shots = ", ".join(f"{name} with {task.get_config('num_fewshot')}" for name, task in loaded.items())
    notes = (f"questions by lm-eval {installed}, few-shot examples: {shots}",)
    return Prompts(tuple(rows), f"task:{','.join(names)}", hashlib.sha256(listed.encode()).hexdigest(), notes)


@contextlib.contextmanager
def _as_in_lm_eval() -> Iterator[None]:
    """Seeds Python's and NumPy's random numbers as lm-eval does, and hides its log lines and bars, inside the block."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        logger.setLevel(level)


def _load(names: Sequence[str], include: list[str]) -> dict[str, Any]:
    """The tasks of these names, patterns or files, as lm-eval's own objects."""
    from lm_eval.tasks import TaskManager

    for folder in include:
        if not Path(folder).is_dir():
            raise InputError(f"--include-path {folder} is not a folder", fix="name a folder with YAML files of tasks")
    manager = TaskManager(include_path=include or None, include_defaults=not include)
    if include and not all(name in manager.task_index for name in names):
        manager = TaskManager(include_path=include)  # reads lm-eval's thousands of files
    chosen = list[str]()
    for name in names:
        is_known = name in manager.task_index or (name.endswith(".yaml") and Path(name).is_file())
        matches = [name] if is_known else fnmatch.filter(sorted(manager.task_index), name)
        if not matches:
            near = difflib.get_close_matches(name, manager.task_index, n=1)
            fix = f"did you mean {near[0]}?" if near else "scoremode lm-eval ls tasks prints all names"
            raise InputError(f"lm-eval has no task '{name}'", fix=fix)
        chosen += matches
    try:
        found: dict[str, Any] = manager.load(chosen)["tasks"]
    except Exception as error:
        raise InputError(f"lm-eval cannot load {', '.join(names)} ({_reason(error)})", fix="check its data") from None
    for name, task in found.items():
        if task.OUTPUT_TYPE not in KINDS or getattr(task, "MULTIMODAL", False):
            raise InputError(f"the task {name} has no questions of text ({task.OUTPUT_TYPE})", fix="name another task")
    return found


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _set_shots(task: Any, given: int | None) -> None:
    """Sets the number of few-shot examples by lm-eval's rule: a task that says 0 keeps 0."""
    own = task.get_config("num_fewshot")
    if given is not None and own != 0:
        task.set_config(key="num_fewshot", value=given)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=1234)


def _rows(name: str, task: Any, limit: int | None, *, as_chat: bool) -> Iterator[Prompt]:
    by_number: dict[int, list[Any]] = {}
    try:
        task.build_all_requests(limit=limit)
        for instance in task.instances:
            by_number.setdefault(instance.doc_id, []).append(instance)
        answers = [_answer(task, instances) for instances in by_number.values()]
    except Exception as error:
        what = f"lm-eval cannot make questions of the task {name} ({_reason(error)})"
        raise InputError(what, fix="check the fields of its rows") from None
    for instances, answer in zip(by_number.values(), answers, strict=True):
        question = str(instances[0].args[0])
        if any(one.args[0] != question for one in instances):
            raise InputError(f"the task {name} asks for the question of an answer", fix="name another task")
        if as_chat:
            yield Prompt([{"role": "user", "content": question}], None if answer is None else answer.lstrip() or None)
        else:
            yield Prompt(question, answer)


def _answer(task: Any, instances: Sequence[Any]) -> str | None:
    """Returns what should follow the question; None if the task does not say it as a text."""
    if task.OUTPUT_TYPE == "loglikelihood":
        return str(instances[0].args[1])
    target = task.doc_to_target(instances[0].doc)
    if isinstance(target, list):
        target = target[0] if target else None
    if task.OUTPUT_TYPE == "generate_until":
        return str(task.config.target_delimiter) + target if isinstance(target, str) and target else None
    choices = task.doc_to_choice(instances[0].doc)
    number = choices.index(target) if target in choices else target
    is_known = isinstance(number, int) and 0 <= number < len(choices)
    return str(instances[number].args[1]) if is_known else None


QUESTIONS = PromptsKind(
    prefix="task:",
    summary="task:NAME: its questions",
    read=task_prompts,
    flags={
        "--limit N": "only the first N questions of each task",
        "--num-fewshot N": "examples before a question (default: what the task says)",
        "--include-path DIR …": "YAML files of your own tasks; their code is run",
        "--apply-chat-template": "ask a task's questions as messages of a user",
    },
    gone={"--task-data": LOCAL},
)
