"""Names ─▶ tasks and groups as lm-eval defines them. Their YAML is lm-eval's own and is never written again here.

What no log-likelihood answers is refused before its data are loaded: tasks that generate text, that roll over whole
texts (``scoremode ppl`` is for those), that need images or sound, or that run code.

The index says in which file a task, a group or a tag is defined. Reading lm-eval's 14,000 files takes ten seconds, so
the index is remembered in the cache folder. It is made again when lm-eval's version changes, or the name, size or time
of any of its files.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import hashlib
import importlib.util
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scoremode.arguments import whole_number
from scoremode.disk.files import write_atomically
from scoremode.disk.folders import TASK_INDEX, cache_folder
from scoremode.errors import InputError, OptionError, ScoremodeError, harmless
from scoremode.harness.task_data import TaskData
from scoremode.installation import pip_install
from scoremode.remote.reachable import offline_if_unreachable
from scoremode.verbs.progress import Progress, announce

SKIPPED = {"__pycache__", ".ipynb_checkpoints"}
ALL_NAMES = "lm-eval ls tasks prints all names"
SEEDS = {"python": 0, "numpy": 1234, "fewshot": 1234}  # those of lm-eval
REFUSED = {
    "generate_until": ("generates text, which no log-likelihood answers", "name tasks of multiple choice"),
    "loglikelihood_rolling": (
        "is the perplexity of whole texts",
        "score it with scoremode ppl --method lm-eval-rolling",
    ),
}


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """Which tasks are asked, and how."""

    names: tuple[str, ...]
    num_fewshot: int | None = None  # None: what each task says
    limit: int | None = None  # documents of each task; None: all
    chat_template: bool = False
    task_data: Path | None = None
    include: tuple[Path, ...] = ()
    generates: bool = False  # may the tasks ask for generated text?


def task_selection(
    tasks: str | Sequence[str],
    num_fewshot: int | None,
    limit: int | None,
    task_data: str | Path | None,
    include_path: str | Path | Sequence[str | Path],
    *,
    chat_template: bool = False,
    generates: bool = False,
) -> TaskSelection:
    """Returns the tasks that a caller named, checked; ``tasks`` may have commas."""
    names = tuple(name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks))
    if not names or not all(names):
        like = "--prompts task:arc_easy" if generates else "--tasks arc_easy,hellaswag"
        raise OptionError("no task was named", fix=f"give {like}")
    include = [include_path] if isinstance(include_path, str | Path) else include_path
    return TaskSelection(
        names,
        _at_least(0, "num_fewshot", num_fewshot, "is negative"),
        _at_least(1, "limit", limit, "leaves no document"),
        chat_template,
        Path(task_data) if task_data is not None else None,
        tuple(map(Path, include)),
        generates,
    )


def _at_least(least: int, name: str, value: Any, problem: str) -> int | None:
    """A whole number that is at least ``least``, or None if none was given."""
    number = whole_number(name, value)
    if number is not None and number < least:
        raise OptionError(f"--{name.replace('_', '-')} {number} {problem}", fix=f"give {least} or more")
    return number


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """Loaded tasks and groups, as lm-eval's own objects."""

    wanted: TaskSelection
    tasks: dict[str, Any]
    groups: dict[str, Any]
    top: tuple[str, ...]  # what was asked for, by name: tasks and groups
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # of --task-data: name -> sha256
    version: str = ""

    def shots(self, name: str) -> int:
        return int(self.tasks[name].get_config("num_fewshot") or 0)


def load_tasks(wanted: TaskSelection, progress: Progress | None = None) -> LoadedTasks:
    """Loads the tasks and their data. No model is needed for that."""
    check_task_names(wanted)
    data = None if wanted.task_data is None else TaskData(wanted.task_data)
    with quiet_harness():
        manager = task_manager(wanted.include, progress)
        names = known_names(manager.task_index, wanted.names)
        announce(progress, "loading the tasks' data")
        with _own_download(data, wanted) as building, seeded():
            try:
                found = manager.load(names)
            except ScoremodeError:
                raise
            except Exception as error:
                raise _unusable(error, building) from None
    tasks, groups = found["tasks"], found.get("groups") or {}
    for name, task in tasks.items():
        _require_supported(task, name, generates=wanted.generates)
        if data is not None and not hasattr(task, "fewshot_cfg"):
            raise InputError(f"{name} is written in Python and loads its own data", fix="leave it out of --tasks")
    notes = [*(data.notes if data else ()), *_set_shots(tasks, wanted.num_fewshot)]
    files = data.files if data else {}
    return LoadedTasks(wanted, tasks, groups, _top(names, manager, tasks, groups), notes, files, lm_eval_version())


def _top(names: Sequence[str], manager: Any, tasks: dict[str, Any], groups: dict[str, Any]) -> tuple[str, ...]:
    """The tasks and groups that the user asked for: a tag stands for its tasks, a file for those that it defines."""
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
    """Sets the number of few-shot examples by lm-eval's rule: a task that says 0 keeps 0. Returns notes on those."""
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
    """How many few-shot examples a task will show."""
    own = config.num_fewshot
    return int(own or 0) if given is None or own == 0 else given


def _require_supported(task: Any, name: str, *, generates: bool) -> None:
    """Refuse a task that log-likelihoods cannot answer, unless texts are to be generated."""
    kind = task.OUTPUT_TYPE
    may_generate = generates and kind == "generate_until"
    if kind in REFUSED and not may_generate:
        what, fix = REFUSED[kind]
        raise InputError(f"the task {name} {what}", fix=fix)
    if kind not in ("multiple_choice", "loglikelihood") and not may_generate:
        raise InputError(f"the task {name} has an unknown kind of question ({kind})", fix="name another task")
    if getattr(task, "MULTIMODAL", False):
        raise InputError(f"the task {name} needs images or sound", fix="name a task of text alone")
    if getattr(task, "UNSAFE_CODE", False):
        raise InputError(f"the task {name} runs code that a model wrote", fix="name another task")


# ── inside of lm-eval ────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def _own_download(data: TaskData | None, wanted: TaskSelection) -> Iterator[list[str]]:
    """Inside the block, tasks are checked before their data are loaded, and local files are used if there are any.

    lm-eval loads the data while it makes a task, inside of groups and tags as well; this is the one place where all
    of them pass. Yields a list of the tasks whose loading has begun.
    """
    from lm_eval.api.task import ConfigurableTask

    original, begun = ConfigurableTask.download, []

    def download(task: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        name = str(task.config.task)
        begun.append(name)
        _require_supported(task, name, generates=wanted.generates)
        if data is not None:
            task.dataset = data.load(task, shots_of(task.config, wanted.num_fewshot))
            return
        safe = {key: value for key, value in (dataset_kwargs or {}).items() if key != "trust_remote_code"}
        try:
            with offline_if_unreachable() as reachable:
                original(task, safe, **more)
        except Exception as error:
            why = reason_of(error) if reachable else "they are not on this machine, and the hub cannot be reached"
            raise InputError(
                f"the data of the task {name} could not be loaded ({why})",
                fix="check the network, or give local files with --task-data DIR",
            ) from None

    ConfigurableTask.download = download
    try:
        yield begun
    finally:
        ConfigurableTask.download = original


def _unusable(error: Exception, begun: Sequence[str]) -> InputError:
    reason = reason_of(error)
    if isinstance(error, ValueError) and "Duplicate task" in reason:
        return OptionError(reason.removeprefix("ValueError: "), fix="ask for each task once: alone, or in one group")
    name = f"the task {begun[-1]}" if begun else "a task"
    return InputError(f"lm-eval cannot make {name} of its data ({reason})", fix="check the fields of its rows")


def reason_of(error: Exception) -> str:
    """The kind of an error of another library, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Hides the log lines of lm-eval and the progress bars of datasets inside the block."""
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
    """Seeds Python's and NumPy's random numbers as lm-eval does, inside the block; afterwards they go on as before."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(SEEDS["python"])
    np.random.seed(SEEDS["numpy"])
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# ── names of tasks ───────────────────────────────────────────────────────────────────────────────────────────────────
def lm_eval_version() -> str:
    """The installed version of lm-eval; InputError if it is not installed."""
    try:
        return version("lm_eval")
    except PackageNotFoundError:
        raise InputError(
            "tasks are defined by lm-evaluation-harness, which is not installed", fix=pip_install("lm-eval")
        ) from None


def task_manager(include: Sequence[Path] = (), progress: Progress | None = None) -> Any:
    """lm-eval's own manager, with all of its tasks and those in the folders of ``include``, which go first."""
    lm_eval_version()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(folder) for folder in include] or None, include_defaults=False)
    for name, entry in _own_entries(progress).items():
        manager.task_index.setdefault(name, entry)
    return manager


def check_task_names(wanted: TaskSelection) -> None:
    """Refuses unknown names of tasks without importing lm-eval, if its names are remembered from an earlier command."""
    lm_eval_version()  # refuses if it is not installed
    for folder in wanted.include:
        if not folder.is_dir():
            raise InputError(f"--include-path {folder} is not a folder", fix="name a folder with YAML files of tasks")
    if wanted.task_data is not None:
        TaskData(wanted.task_data)  # refuses if it is not a folder
    spec = importlib.util.find_spec("lm_eval")
    if wanted.include or spec is None or not spec.submodule_search_locations:
        return
    known = _remembered_index(cache_folder() / TASK_INDEX, _stamp(Path(spec.submodule_search_locations[0]) / "tasks"))
    if known is not None:
        known_names(known.entries, wanted.names)


def known_names(index: Mapping[str, Any], wanted: Sequence[str]) -> list[str]:
    """Names in lm-eval's index: patterns such as ``mmlu_*`` become the names that match; files stay as they are."""
    found: list[str] = []
    for name in wanted:
        if name in index or (name.endswith(".yaml") and Path(name).is_file()):
            matches = [name]
        elif any(sign in name for sign in "*?["):
            matches = fnmatch.filter(sorted(index), name)
        else:
            matches = []
        if not matches:
            near = difflib.get_close_matches(name, index, n=3, cutoff=0.6)
            fix = f"did you mean {' or '.join(map(harmless, near))}?" if near else ALL_NAMES
            raise InputError(f"lm-eval has no task '{name}'", fix=fix)
        found += matches
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"the task {twice} is given twice", fix="give it once")
    return found


# ── the index ───────────────────────────────────────────────────────────────────────────────────────────────────────
class TaskIndex(msgspec.Struct):
    """Where lm-eval defines its tasks, groups and tags; kept in the cache folder."""

    stamp: str  # of lm-eval's files
    entries: dict[str, tuple[str, str | None, set[str]]]  # by name: its kind, its file, its tags


def _own_entries(progress: Progress | None) -> dict[str, Any]:
    """The entries of lm-eval's own index: from the cache if they are still valid there, else from lm-eval's files."""
    import lm_eval.tasks

    root, path = Path(lm_eval.tasks.__file__).parent, cache_folder() / TASK_INDEX
    stamp = _stamp(root)
    found = _remembered(path, stamp, root)
    if found is not None:
        return found
    announce(progress, "reading the names of lm-eval's tasks, once per version")
    found = dict(lm_eval.tasks.TaskManager().task_index)
    entries = {}
    for name, entry in found.items():
        file = None if entry.yaml_path is None else os.path.relpath(entry.yaml_path, root)
        entries[name] = (entry.kind.name, file, set(entry.tags))
    with contextlib.suppress(OSError):  # without a writable cache they are read again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(TaskIndex(stamp, entries), order="deterministic"))
    return found


def _remembered(path: Path, stamp: str, root: Path) -> dict[str, Any] | None:
    """The index in the cache as lm-eval's own entries; None if it is missing, outdated or damaged."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return _read_entries(path, stat.st_mtime_ns, stat.st_size, stamp, root)


@functools.lru_cache(maxsize=1)
def _read_entries(path: Path, _written: int, _size: int, stamp: str, root: Path) -> dict[str, Any] | None:
    """Reads the entries, once for each state of the file: several comparisons in one process share them."""
    from lm_eval.tasks._index import Entry, Kind

    known = _remembered_index(path, stamp)
    if known is None:
        return None
    try:
        return {
            name: Entry(name=name, kind=Kind[kind], yaml_path=None if file is None else root / file, tags=tags)
            for name, (kind, file, tags) in known.entries.items()
        }
    except KeyError:
        return None


def _remembered_index(path: Path, stamp: str) -> TaskIndex | None:
    """The index in the cache, without lm-eval; None if it is missing, outdated or damaged."""
    try:
        known = msgspec.json.decode(path.read_bytes(), type=TaskIndex)
    except (OSError, ValueError, RecursionError):
        return None
    outside = any(file and ".." in file and ".." in Path(file).parts for _, file, _ in known.entries.values())
    return None if known.stamp != stamp or outside else known


def _stamp(root: Path) -> str:
    """A digest of lm-eval's version and of its task files' names, sizes and times, which are cheap to read."""
    found = hashlib.sha256(f"{lm_eval_version()}|{root}".encode())
    for line in _files(str(root)):
        found.update(line.encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as inside:
        entries = sorted(inside, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            yield from _files(entry.path) if entry.name not in SKIPPED else ()
        elif entry.name.endswith(".yaml"):
            stat = entry.stat()
            yield f"{entry.path}|{stat.st_size}|{stat.st_mtime_ns}\n"
