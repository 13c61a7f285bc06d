"""``scoremode tasks``: a baseline and its candidates on tasks that lm-eval defines, document by document.

tasks ──lm-eval──▶ documents ──any engine──▶ log-likelihoods ──lm-eval──▶ right or wrong ──▶ paired statistics

One model is open at a time, the baseline first. Answers are kept per document (answering.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from scoremode.arguments import require_flag
from scoremode.errors import InputError, OptionError, did_you_mean
from scoremode.harness.answering import ModelAnswers, TaskDocuments, answer_documents
from scoremode.harness.documents import Render, build_documents, judges_itself
from scoremode.harness.encoding import hugging_face_tokenizer, render
from scoremode.harness.loading import SEEDS, LoadedTasks, check_task_names, load_tasks, task_selection
from scoremode.harness.results import TasksComparison, groups_of, pair_tasks
from scoremode.references.kld import is_kld
from scoremode.remote.uri import Place, local_path
from scoremode.store import runs
from scoremode.text.tokenizer import TextTokenizer
from scoremode.verbs.arguments import EngineOptionArguments, ModelArguments, spelled_out, split_arguments
from scoremode.verbs.model import GivenModel, GivenTokenizer, LazyModel, is_loaded, loaded_sides
from scoremode.verbs.progress import Progress, announce
from scoremode.verbs.progress_display import shows_progress
from scoremode.verbs.sides import CompareRequest, Folders, assign_engines, short


@spelled_out(ModelArguments)
@shows_progress
def tasks(
    baseline: GivenModel,
    *candidates: GivenModel,
    tasks: str | Sequence[str],
    num_fewshot: int | None = None,
    limit: int | None = None,
    metric: str | None = None,
    apply_chat_template: bool = False,
    task_data: str | Path | None = None,
    include_path: str | Path | Sequence[str | Path] = (),
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    baseline_engine: str | None = None,
    baseline_options: EngineOptionArguments | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    rows: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Unpack[ModelArguments],
) -> list[TasksComparison]:
    """Compares candidates with a baseline on lm-eval's log-likelihood tasks: names, groups, tags, patterns or files.

    ``num_fewshot`` None: each task's own. ``limit`` takes the first documents of each task. ``metric`` is the one
    that recovery and flips are about: acc_norm where a task has it, else acc. ``task_data`` is a folder with local
    data, ``include_path`` folders with definitions of your own (which may hold code). ``rows`` are tasks and groups
    that must be among the results: unknown ones are refused before a model is opened.

    >>> import scoremode as sm
    >>> found = sm.tasks("base", "base-Q4", tasks=["arc_easy", "hellaswag"])[0]   # doctest: +SKIP
    >>> found.overall["recovery"], found.overall["recovery_stderr"]               # doctest: +SKIP
    (0.9912, 0.0041)
    """
    folders = Folders(local_path(out, "--out") if out is not None else None, fresh, progress)
    require_flag("apply_chat_template", apply_chat_template)
    asked = task_selection(tasks, num_fewshot, limit, task_data, include_path, chat_template=apply_chat_template)
    _, given = split_arguments(options)
    check_task_names(asked)
    request = CompareRequest(engine, given, baseline_engine, baseline_options, tokenizer)
    models = _prepared(baseline, candidates, request, folders)
    for held in models:
        held.require_prefill()
        held.settings()  # refuses what its engine would refuse, before data are loaded
    loaded = load_tasks(asked, progress)
    _require_rows(loaded, rows)
    _require_metric(loaded, metric)
    work = _TaskWork(loaded, folders, metric)
    first = work.answers(models[0], "baseline")
    return [work.comparison(models[0], first, held) for held in models[1:]]


def _prepared(
    baseline: GivenModel, candidates: Sequence[GivenModel], request: CompareRequest, folders: Folders
) -> list[LazyModel]:
    """The baseline, then the candidates; none of them is loaded yet, unless the caller has loaded it."""
    if any(map(is_loaded, (baseline, *candidates))):
        first = {**request.options, **(request.baseline_options or {})}
        sides = [(candidate, request.engine, request.options) for candidate in candidates]
        engine = request.baseline_engine or request.engine
        models = loaded_sides([(baseline, engine, first), *sides], request.tokenizer)
        folders.require_candidates([model.subject.name for model in models[1:]], "a model")
        return models
    folders.require_candidates(candidates, "a model")
    for name in (baseline, *candidates):
        if runs.is_run(name) or is_kld(name):
            raise InputError(f"{name} has scores of a text, and tasks need a model", fix="name the model itself")
    first_settings, others = assign_engines(baseline, candidates, request, divergence=False)
    assert first_settings is not None, "a baseline that is a model is scored"
    return [first_settings.prepare(), *(others[name].prepare() for name in candidates)]


def _require_rows(loaded: LoadedTasks, rows: Sequence[str]) -> None:
    known = [*loaded.tasks, *loaded.groups]
    for name in rows:
        if name not in known:
            raise OptionError(f"the task '{name}' is not asked here", fix=did_you_mean(name, known))


def _require_metric(loaded: LoadedTasks, metric: str | None) -> None:
    """Refuse a metric that no task has. One that only some tasks have is allowed, and noted for the others."""
    known = sorted({name for task in loaded.tasks.values() for name in task.aggregation()})
    if metric is not None and metric.split(",")[0] not in known:  # lm-eval writes a filter after a comma
        raise OptionError(f"no task here has the metric '{metric}'", fix=did_you_mean(metric, known))


@dataclass(slots=True)
class _TaskWork:
    """Loaded tasks, and the documents that were last made from them."""

    loaded: LoadedTasks
    folders: Folders
    metric: str | None
    documents: TaskDocuments | None = None

    def answers(self, model: LazyModel, folder: str) -> ModelAnswers:
        progress = self.folders.progress
        with closing(model) as held:
            announce(progress, f"making questions for {held.subject.name}")
            if self.documents is None or self.loaded.wanted.chat_template:  # a template writes other questions
                write = _renderer(held.subject.tokenizer) if self.loaded.wanted.chat_template else None
                self.documents = {name: build_documents(self.loaded, name, write) for name in self.loaded.tasks}
            out = self.folders.folder(folder)
            assert not isinstance(out, Place), "refused before"
            return answer_documents(held, self.documents, out=out, fresh=self.folders.fresh, progress=progress)

    def comparison(self, baseline: LazyModel, first: ModelAnswers, candidate: LazyModel) -> TasksComparison:
        second = self.answers(candidate, candidate.subject.name)
        assert self.documents is not None, "made for the candidate"
        names = [short(held.subject.name) for held in (baseline, candidate)]
        found = pair_tasks(self.loaded, self.documents, (first, second), self.metric)
        sizes = {task.name: task.paired.documents for task in found}
        notes = _notes(self.loaded, self.metric, found)
        for name, side in zip(names, (first, second), strict=True):
            notes += [f"{name}: {note}" for note in side.notes]
        return TasksComparison(
            name=names[1],
            baseline_name=names[0],
            tasks=found,
            groups=groups_of(self.loaded, sizes),
            top=self.loaded.top,
            baseline=first.facts,
            candidate=second.facts,
            settings=_settings(self.loaded, self.metric),
            notes=tuple(dict.fromkeys(notes)),
            manifest={},
        )


def _renderer(tokenizer: TextTokenizer) -> Render:
    def write(messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        return render(tokenizer, hugging_face_tokenizer(tokenizer), messages, add_generation_prompt, {})

    return write


def _settings(loaded: LoadedTasks, metric: str | None) -> dict[str, Any]:
    wanted = loaded.wanted
    return {
        "tasks": list(wanted.names),
        "limit": wanted.limit,
        "num_fewshot": {name: loaded.shots(name) for name in loaded.tasks},
        "apply_chat_template": wanted.chat_template,
        "metric": metric,
        "seeds": SEEDS,
        "lm_eval": loaded.version,
        "task_files": dict(loaded.files),
    }


def _notes(loaded: LoadedTasks, metric: str | None, found: Sequence[Any]) -> list[str]:
    """Notes that a reader of the results must know."""
    notes = list(loaded.notes)
    if loaded.wanted.limit is not None:
        notes.append(f"only the first {loaded.wanted.limit:,} documents of each task (--limit)")
    for task in found:
        if metric is not None and task.paired.metric != metric:
            notes.append(f"{task.name}: has no {metric}, so recovery is about {task.paired.metric}")
        unknown = sum(document.gold is None for document in task.documents)
        if unknown:
            own = judges_itself(loaded.tasks[task.name])
            counted = "the task's own rule judges them" if own else "they count as wrong, as in lm-eval"
            notes.append(
                f"{task.name}: {unknown:,} of {len(task.documents):,} documents name none of their choices as right; "
                f"{counted}, and margins are not known"
            )
    notes += [
        f"{name}: lm-eval does not aggregate this group; its members count alike"
        for name, group in loaded.groups.items()
        if not group.aggregate_metric_list
    ]
    return notes
