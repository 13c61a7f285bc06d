"""Names ─▶ tasks and groups as lm-eval defines them. Their YAML is lm-eval's own and is never written again here.

What no log-likelihood answers is refused before its data are loaded: tasks that generate text, that roll over whole
texts (``scoremode ppl`` is for those), that need images or sound, or that run code.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.errors import InputError, OptionError, ScoremodeError
from scoremode.harness.task_data import TaskData
from scoremode.harness.task_index import known_names, lm_eval_version, task_manager
from scoremode.verbs.progress import Progress, announce

SEEDS = {"python": 0, "numpy": 1234, "fewshot": 1234}  # those of lm-eval
REFUSED = {
    "generate_until": ("generates text, which no log-likelihood answers", "name tasks of multiple choice"),
    "loglikelihood_rolling": (
        "is the perplexity of whole texts",
        "score it with scoremode ppl --method lm-eval-rolling",
    ),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which tasks, and how they are asked."""

    names: tuple[str, ...]
    num_fewshot: int | None = None  # None: what each task says
    limit: int | None = None  # documents of each task; None: all
    chat_template: bool = False
    task_data: Path | None = None
    include: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tasks and groups, in lm-eval's own objects."""

    wanted: Wanted
    tasks: dict[str, Any]
    groups: dict[str, Any]
    top: tuple[str, ...]  # what was asked for, by name: tasks and groups
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # of --task-data: name -> sha256
    version: str = ""

    def shots(self, name: str) -> int:
        return int(self.tasks[name].get_config("num_fewshot") or 0)


def load_tasks(wanted: Wanted, progress: Progress | None = None) -> Loaded:
    """The tasks with their data. No model is needed for that."""
    data = None if wanted.task_data is None else TaskData(wanted.task_data)
    lm_eval_version()  # refuses if it is not installed
    with quiet_harness():
        manager = task_manager(wanted.include, progress)
        names = known_names(manager, wanted.names)
        announce(progress, "loading the tasks' data")
        with _own_download(data, wanted.num_fewshot) as building, seeded():
            try:
                found = manager.load(names)
            except ScoremodeError:
                raise
            except Exception as error:
                raise _unusable(error, building) from None
    tasks, groups = found["tasks"], found.get("groups") or {}
    for name, task in tasks.items():
        _require_supported(task, name)
        if data is not None and not hasattr(task, "fewshot_cfg"):
            raise InputError(f"{name} is written in Python and loads its own data", fix="leave it out of --tasks")
    notes = [*(data.notes if data else ()), *_set_shots(tasks, wanted.num_fewshot)]
    files = data.files if data else {}
    return Loaded(wanted, tasks, groups, _top(names, manager, tasks, groups), notes, files, lm_eval_version())


def _top(names: Sequence[str], manager: Any, tasks: dict[str, Any], groups: dict[str, Any]) -> tuple[str, ...]:
    """What was asked for: a tag stands for its tasks, a file for what it defines."""
    found: list[str] = []
    for name in names:
        if name in tasks or name in groups:
            found.append(name)
        elif name in manager.task_index:
            found += sorted(member for member in manager.task_index[name].tags if member in tasks)
    inside = {child for group in groups.values() for child in group.child_names}
    rest = [name for name in (*groups, *tasks) if name not in found and name not in inside]  # of files
    below = {task.task_name for name in found if name in groups for task in groups[name].get_all_tasks()}
    return tuple(dict.fromkeys(found + [name for name in rest if name not in below]))


def _set_shots(tasks: dict[str, Any], given: int | None) -> list[str]:
    """The number of few-shot examples by lm-eval's rule: a task that says 0 keeps it."""
    notes = []
    for name, task in tasks.items():
        own = task.get_config("num_fewshot")
        if given is not None and own == 0 and given > 0:
            notes.append(f"{name}: 0 few-shot examples, as its definition demands")
        elif given is not None:
            task.set_config(key="num_fewshot", value=given)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEEDS["fewshot"])
    return notes


def shots_of(config: Any, given: int | None) -> int:
    """How many examples a task will show."""
    own = config.num_fewshot
    return int(own or 0) if given is None or own == 0 else given


def _require_supported(task: Any, name: str) -> None:
    """Refuse what no log-likelihood answers."""
    kind = task.OUTPUT_TYPE
    if kind in REFUSED:
        what, fix = REFUSED[kind]
        raise InputError(f"the task {name} {what}", fix=fix)
    if kind not in ("multiple_choice", "loglikelihood"):
        raise InputError(f"the task {name} has an unknown kind of question ({kind})", fix="name another task")
    if getattr(task, "MULTIMODAL", False):
        raise InputError(f"the task {name} needs images or sound", fix="name a task of text alone")
    if getattr(task, "UNSAFE_CODE", False):
        raise InputError(f"the task {name} runs code that a model wrote", fix="name another task")


# ── inside of lm-eval ────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def _own_download(data: TaskData | None, num_fewshot: int | None) -> Iterator[list[str]]:
    """Inside the block, tasks are checked before their data are loaded, and local files are used if there are any.

    lm-eval loads the data while it makes a task, inside of groups and tags as well; this is the one place where all
    of them pass. Gives the names of the tasks that were begun.
    """
    from lm_eval.api.task import ConfigurableTask

    original, begun = ConfigurableTask.download, []

    def download(task: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        name = str(task.config.task)
        begun.append(name)
        _require_supported(task, name)
        if data is not None:
            task.dataset = data.load(task, shots_of(task.config, num_fewshot))
            return
        safe = {key: value for key, value in (dataset_kwargs or {}).items() if key != "trust_remote_code"}
        try:
            original(task, safe, **more)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
            raise InputError(
                f"the data of the task {name} could not be loaded ({reason})",
                fix="check the network, or give local files with --task-data DIR",
            ) from None

    ConfigurableTask.download = download
    try:
        yield begun
    finally:
        ConfigurableTask.download = original


def _unusable(error: Exception, begun: Sequence[str]) -> InputError:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
    if isinstance(error, ValueError) and "Duplicate task" in reason:
        return OptionError(lines[0], fix="ask for each task once: alone, or in one group")
    name = f"the task {begun[-1]}" if begun else "a task"
    return InputError(f"lm-eval cannot make {name} of its data ({reason})", fix="check the fields of its rows")


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """No log lines of lm-eval, and no progress bars of datasets, inside the block."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    before, bars = [logger.level for logger in loggers], not datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Python's and NumPy's random numbers begin as in lm-eval inside the block; afterwards they go on as before."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(SEEDS["python"])
    np.random.seed(SEEDS["numpy"])
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
