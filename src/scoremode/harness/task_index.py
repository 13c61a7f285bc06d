"""lm-eval's tasks by name: its own index, remembered, because reading its 14,000 files takes ten seconds.

The index says in which file a task, a group or a tag is defined. It is remembered in the cache folder, and made again
when lm-eval's version, or the name, size or time of any of its files changes.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scoremode.disk.files import write_atomically
from scoremode.disk.folders import TASK_INDEX, cache_folder
from scoremode.errors import InputError, OptionError, harmless
from scoremode.strict_json import read_object
from scoremode.verbs.progress import Progress, announce

SKIPPED = {"__pycache__", ".ipynb_checkpoints"}
ALL_NAMES = "lm-eval ls tasks prints all names"


def lm_eval_version() -> str:
    """As installed; InputError if it is not."""
    try:
        return version("lm_eval")
    except PackageNotFoundError:
        raise InputError(
            "tasks are defined by lm-evaluation-harness, which is not installed", fix="pip install '.[lm-eval]'"
        ) from None


def task_manager(include: Sequence[Path] = (), progress: Progress | None = None) -> Any:
    """lm-eval's own manager, with all of its tasks and those in the folders of ``include``, which go first."""
    lm_eval_version()
    from lm_eval.tasks import TaskManager

    for folder in include:
        if not folder.is_dir():
            raise InputError(f"--include-path {folder} is not a folder", fix="name a folder with YAML files of tasks")
    manager = TaskManager(include_path=[str(folder) for folder in include] or None, include_defaults=False)
    for name, entry in _own_entries(progress).items():
        manager.task_index.setdefault(name, entry)
    return manager


def known_names(manager: Any, wanted: Sequence[str]) -> list[str]:
    """Names as lm-eval knows them, patterns such as ``mmlu_*`` replaced by what they match; files stay as they are."""
    found: list[str] = []
    for name in wanted:
        if name in manager.task_index or (name.endswith(".yaml") and Path(name).is_file()):
            matches = [name]
        elif any(sign in name for sign in "*?["):
            matches = fnmatch.filter(sorted(manager.task_index), name)
        else:
            matches = []
        if not matches:
            near = difflib.get_close_matches(name, manager.task_index, n=3, cutoff=0.6)
            fix = f"did you mean {' or '.join(map(harmless, near))}?" if near else ALL_NAMES
            raise InputError(f"lm-eval has no task '{name}'", fix=fix)
        found += matches
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"the task {twice} is given twice", fix="give it once")
    return found


# ── remembered ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _own_entries(progress: Progress | None) -> dict[str, Any]:
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    stamp = _stamp(root)
    path = cache_folder() / TASK_INDEX
    found = _remembered(path, stamp, root)
    if found is None:
        announce(progress, "reading the names of lm-eval's tasks, once per version")
        found = lm_eval.tasks.TaskManager().task_index
        with contextlib.suppress(OSError):  # without a writable cache they are read again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"stamp": stamp, "entries": _as_json(found, root)}).encode())
    return found


def _stamp(root: Path) -> str:
    """Everything about lm-eval's task files that is cheap to read."""
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


def _as_json(found: dict[str, Any], root: Path) -> dict[str, Any]:
    return {
        name: [
            entry.kind.name,
            None if entry.yaml_path is None else os.path.relpath(entry.yaml_path, root),
            sorted(entry.tags),
        ]
        for name, entry in found.items()
    }


def _remembered(path: Path, stamp: str, root: Path) -> dict[str, Any] | None:
    """The remembered index; None if it is another one, or not as it was written."""
    from lm_eval.tasks._index import Entry, Kind

    try:
        stored = read_object(path)
        if stored.get("stamp") != stamp:
            return None
        found = {}
        for name, (kind, file, tags) in stored["entries"].items():
            if file is not None and ".." in Path(file).parts:
                return None
            yaml = None if file is None else root / file
            found[name] = Entry(name=name, kind=Kind[kind], yaml_path=yaml, tags=set(tags))
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
