"""``scoremode tasks``: a baseline and its candidates on tasks, document by document, from what lm-eval logged.

lm-eval runs the models, through our adapter (``scoremode lm-eval``) or any back end of its own. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scoremode.core.typed import typed
from scoremode.core.verbs.compared_models import short
from scoremode.errors import InputError, OptionError, UnknownArgumentError, did_you_mean
from scoremode.studies.tasks.logs import RUN, LoggedModel, LoggedResults, read_log
from scoremode.studies.tasks.results import TasksComparison, groups_of, pair_task, top_of
from scoremode.studies.tasks.statistics import PairedTask

TOLD = ("requests", "notes")  # what our adapter says that is shown as notes


@typed
def tasks(
    baseline: str | Path,
    *candidates: str | Path,
    tasks: str | Sequence[str] | None = None,
    metric: str | None = None,
    **others: Any,
) -> list[TasksComparison]:
    """Compares candidates with a baseline on tasks, from folders that lm-eval wrote with ``--log_samples``.

    ``tasks`` are the tasks and groups to compare, all by default. ``metric`` is the one that recovery and flips are
    about: acc_norm where a task has it, else acc.

    >>> import scoremode as sm
    >>> found = sm.tasks("logs/base", "logs/base-Q4")[0]                          # doctest: +SKIP
    >>> found.overall["recovery"], found.overall["recovery_stderr"]               # doctest: +SKIP
    (0.9912, 0.0041)
    """
    for name in others:
        raise UnknownArgumentError(f"{name} is no argument of tasks, which runs no model", fix=RUN)
    if not candidates:
        raise InputError("there is no candidate", fix="name a folder of lm-eval after the baseline's")
    first = read_log(baseline)
    sides = [read_log(candidate) for candidate in candidates]
    names = _names([first, *sides])
    wanted = _wanted(first, tasks)
    return [
        _comparison(first, side, (names[0], name), wanted=wanted, metric=metric)
        for side, name in zip(sides, names[1:], strict=True)
    ]


def _names(sides: Sequence[LoggedModel]) -> list[str]:
    """Names that tell the models apart: of the models, else of their folders, else their paths."""
    for names in ([short(side.name) for side in sides], [Path(side.source).name for side in sides]):
        if len(set(names)) == len(sides):
            return names
    paths = [side.source for side in sides]
    if len(set(paths[1:])) < len(paths) - 1:
        raise InputError("a candidate is given twice", fix="give it once")
    return paths


def _wanted(first: LoggedModel, tasks: str | Sequence[str] | None) -> list[str] | None:
    """The tasks that were named, alone or as a group of the baseline; None if none were."""
    if tasks is None:
        return None
    names = list[str]()
    groups, _ = groups_of([first], {name: len(task.documents) for name, task in first.tasks.items()})
    inside = {name: [name] for name in first.tasks} | {name: list(weights) for name, weights in groups.items()}
    for name in (entry.strip() for entry in (tasks.split(",") if isinstance(tasks, str) else tasks)):
        if name not in inside:
            raise OptionError(f"{first.source} has no task '{name}'", fix=did_you_mean(name, inside))
        names += inside[name]
    return list(dict.fromkeys(names))


def _comparison(
    base: LoggedModel,
    cand: LoggedModel,
    names: tuple[str, str],
    *,
    wanted: Sequence[str] | None,
    metric: str | None,
) -> TasksComparison:
    task_names = sorted(base.tasks | cand.tasks) if wanted is None else wanted
    shared = [name for name in task_names if name in base.tasks and name in cand.tasks]
    for name in task_names:
        if name not in shared:
            lacking, fix = (cand if name in base.tasks else base).source, "run it for both"
            more = f", or give --tasks {','.join(shared)}" if shared else ""
            raise InputError(f"{lacking} has no samples of the task {name}", fix=fix + more)
    tasks = tuple(pair_task(base.tasks[name], cand.tasks[name], metric) for name in shared)
    metrics = sorted({name for task in tasks for name in task.metrics})
    if metric is not None and metric not in metrics:  # one that only some tasks have is noted for the others
        raise OptionError(f"no task here has the metric '{metric}'", fix=did_you_mean(metric, metrics))
    groups, notes = groups_of([base, cand], {task.name: task.count for task in tasks})
    for name, side in zip(names, (base, cand), strict=True):
        notes += [*side.notes, *(f"{name}: {note}" for note in _notes_on_model(side))]
    return TasksComparison(
        name=names[1],
        baseline_name=names[0],
        tasks=tasks,
        groups=groups,
        top=top_of(shared, groups),
        baseline=_facts(base),
        candidate=_facts(cand),
        settings=_settings(base, tasks, metric),
        notes=tuple(dict.fromkeys([*_notes(base, cand, tasks, metric), *notes])),
        manifest={},
    )


# ── what a reader must know ──────────────────────────────────────────────────────────────────────────────────────────
def _facts(side: LoggedModel) -> dict[str, object]:
    """The model and its engine, as our adapter describes them, or as lm-eval does."""
    results, config = side.last, side.last.config
    versions = {"lm_eval": results.lm_eval_version, "transformers": results.transformers_version}
    theirs = {
        "model_revision": config.model_sha,
        "engine": f"lm-eval {config.model or 'of an unknown back end'}",
        "dtype": config.model_dtype,
        "device": config.device,
        "versions": {name: value for name, value in versions.items() if value is not None},
    }
    ours = {name: value for name, value in msgspec.structs.asdict(config.scoremode).items() if name not in TOLD}
    facts = [(name, value) for side_facts in (theirs, ours) for name, value in side_facts.items() if value is not None]
    return {"model": side.name, **dict(facts), "samples": dict(side.files)}


def _settings(base: LoggedModel, tasks: Sequence[PairedTask], metric: str | None) -> dict[str, object]:
    results, config = base.last, base.last.config
    seeds = {"python": config.random_seed, "numpy": config.numpy_seed, "fewshot": config.fewshot_seed}
    return {
        "tasks": [task.name for task in tasks],
        "limit": _limit(results),
        "num_fewshot": {task.name: task.shots for task in tasks},
        "apply_chat_template": results.chat_template is not None if base.results else None,
        "metric": metric,
        "seeds": {name: seed for name, seed in seeds.items() if seed is not None},
        "lm_eval": results.lm_eval_version or "of an unknown version",
    }


def _limit(results: LoggedResults) -> str | None:
    """What was given to ``--limit``: documents of each task, or a share of them."""
    return None if results.config.limit is None else f"{results.config.limit:g}"


def _notes_on_model(side: LoggedModel) -> list[str]:
    """What our adapter counted and noted."""
    ours = side.last.config.scoremode
    texts = {"truncated": "were cut on the left to fit the model's context", "spanning": "have a token across a border"}
    notes = [
        f"{count:,} of {ours.requests.get('loglikelihood')} requests {text}, as in lm-eval"
        for name, text in texts.items()
        if (count := ours.requests.get(name, 0)) > 0
    ]
    return [*notes, *ours.notes]


def _notes(base: LoggedModel, cand: LoggedModel, tasks: Sequence[PairedTask], metric: str | None) -> list[str]:
    limits = dict.fromkeys(limit for results in base.results.values() if (limit := _limit(results)) is not None)
    notes = [f"not all documents: lm-eval ran with --limit {limit}" for limit in limits]
    versions = [side.last.lm_eval_version for side in (base, cand)]
    if versions[0] != versions[1]:
        notes.append(f"the baseline was run by lm-eval {versions[0]}, the candidate by {versions[1]}")
    for task in tasks:
        if metric is not None and task.metric != metric:
            notes.append(f"{task.name}: has no {metric}, so recovery is about {task.metric}")
        if others := base.tasks[task.name].others:
            notes.append(f"{task.name}: only means over documents are compared, and not {', '.join(others)}")
        if task.kl is not None and task.chosen is None:
            notes.append(f"{task.name}: the log does not show which choice is the likeliest per character")
        unknown = sum(document.gold is None for document in task.documents)
        if unknown and task.baseline is not None:
            of = f"{unknown:,} of {len(task.documents):,} documents"
            notes.append(f"{task.name}: the log does not say which choice is right in {of}, so margins are not known")
    return notes
