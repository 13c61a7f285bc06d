"""Two models on the same documents: a value that statistics, tables and the report are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from scoremode.cache.task_answers import Answer
from scoremode.errors import InputError
from scoremode.harness.answering import ModelAnswers, TaskDocuments, require_greedy
from scoremode.harness.documents import TaskDocument, TaskMetrics, metrics_of
from scoremode.harness.loading import LoadedTasks
from scoremode.scores.frames import ArrowTable, few_lines
from scoremode.statistics.tasks import PairedTask, Parts, row_statistics
from scoremode.values import Floats, rounded

ALL = "all"  # the name of the row over everything
PREFERRED = ("acc_norm", "acc")  # the metric that recovery is about, if a task has it


@dataclass(frozen=True, slots=True, eq=False)
class TaskPair:
    """One task, answered by both models."""

    paired: PairedTask
    documents: Sequence[TaskDocument]
    baseline: Sequence[Sequence[Answer]]  # one list per document
    candidate: Sequence[Sequence[Answer]]
    shots: int
    version: str  # of the task's definition

    @property
    def name(self) -> str:
        return self.paired.name


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """A group as lm-eval defines it, with the weight of each of its tasks."""

    name: str
    weights: Mapping[str, float]  # by task; they sum to 1


@dataclass(frozen=True, slots=True)
class Flip:
    """A document that one model answers right and the other wrong."""

    task: str
    document: TaskDocument
    gained: bool
    baseline: tuple[float, ...]  # log-probabilities of the choices
    candidate: tuple[float, ...]
    chosen: tuple[int | None, int | None]  # by the baseline, by the candidate; None if there is one continuation
    per_character: bool  # is the choice made by log-probability per character, as acc_norm does?


@dataclass(frozen=True, eq=False)
class TasksComparison(ArrowTable):
    """The comparison of a candidate with a baseline on tasks.

    ``rows`` has one dict per task, per group and over all: see docs/tasks.md. As a table, it has these rows.
    """

    name: str  # of the candidate, unique among those that are compared together
    baseline_name: str
    tasks: tuple[TaskPair, ...]
    groups: tuple[TaskGroup, ...]
    top: tuple[str, ...]  # what was asked for: tasks and groups, which count alike over all
    baseline: Mapping[str, Any]  # the model, its engine and settings
    candidate: Mapping[str, Any]
    settings: Mapping[str, Any]  # how tasks were asked: limit, examples, seeds, versions, files
    notes: tuple[str, ...]
    manifest: Mapping[str, Any]  # command

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the tasks, then of the groups, then the overall row."""
        found = [row_statistics(task.name, "task", [(task.paired, 1.0)]) for task in self.tasks]
        found += [row_statistics(group.name, "group", self._parts(group.weights)) for group in self.groups]
        return [*found, row_statistics(ALL, "all", self._parts(self.weights))]

    def to_arrow(self) -> Any:
        """The rows as a ``pyarrow.Table``."""
        import pyarrow as pa

        return pa.Table.from_pylist(self.rows)

    def __repr__(self) -> str:
        row = self.overall
        known = " ".join(rounded(row["recovery"], row["recovery_stderr"])).rstrip()
        recovery = f"recovery {known}" if row["recovery"] is not None else ""
        return few_lines(
            f"Comparison of {self.name} with {self.baseline_name} on {len(self.tasks)} tasks",
            recovery,
            ", ".join(task.name for task in self.tasks),
        )

    @property
    def overall(self) -> dict[str, Any]:
        """The row over all tasks."""
        return self.rows[-1]

    def row(self, name: str) -> dict[str, Any]:
        """The row of a task or group."""
        return next(row for row in self.rows if row["name"] == name)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each task over all: each name asked for weighs the same, and a group divides its share."""
        inside = {group.name: group.weights for group in self.groups}
        found = dict.fromkeys((task.name for task in self.tasks), 0.0)
        for name in self.top:
            for task, weight in inside.get(name, {name: 1.0}).items():
                found[task] += weight / len(self.top)
        return found

    def _parts(self, weights: Mapping[str, float]) -> Parts:
        return [(task.paired, weights[task.name]) for task in self.tasks if weights.get(task.name)]

    def flips(self) -> Iterator[Flip]:
        """Documents that only one of the models answers right, task by task, the largest changes first."""
        for task in self.tasks:
            yield from sorted(_flips(task), key=lambda flip: -_strength(flip))


def _flips(task: TaskPair) -> Iterator[Flip]:
    base, cand = task.paired.metrics[task.paired.metric]
    per_character = task.paired.metric == "acc_norm"
    for i in np.flatnonzero((base != cand) & np.isin(base, (0, 1)) & np.isin(cand, (0, 1))).tolist():
        document = task.documents[i]
        before, after = (_log_probs(document, side[i]) for side in (task.baseline, task.candidate))
        first, second = (_choice(document, side, per_character=per_character) for side in (before, after))
        chosen = (first, second) if document.choices else (None, None)
        gained = bool(cand[i] > base[i])
        yield Flip(task.name, document, gained, tuple(before.tolist()), tuple(after.tolist()), chosen, per_character)


def _strength(flip: Flip) -> float:
    """By how many nats the right answer's lead over the best other one moved."""
    document = flip.document
    several = document.choices and document.gold and not _all_right(document)
    with np.errstate(invalid="ignore"):
        before, after = (
            _margin(document, np.array(side)) if several else side[0] for side in (flip.baseline, flip.candidate)
        )
        moved = abs(after - before)
    return math.inf if math.isnan(moved) else moved


# ── made of answers ──────────────────────────────────────────────────────────────────────────────────────────────────
def pair_tasks(
    loaded: LoadedTasks, documents: TaskDocuments, sides: tuple[ModelAnswers, ModelAnswers], metric: str | None
) -> tuple[TaskPair, ...]:
    """Pairs the two models' results of every task, measured by lm-eval's own code."""
    found = []
    for name, its in documents.items():
        task = loaded.tasks[name]
        for side in sides:
            require_greedy(name, task, side.answers[name], str(side.facts.get("engine")))
        base, cand = (metrics_of(task, its, side.answers[name]) for side in sides)
        paired = _paired(name, its, (base, cand), (sides[0].answers[name], sides[1].answers[name]), metric)
        version = str(getattr(task, "VERSION", "") or "")
        found.append(TaskPair(paired, its, sides[0].answers[name], sides[1].answers[name], loaded.shots(name), version))
    return tuple(found)


def main_metric(name: str, known: Sequence[str], wanted: str | None) -> str:
    """The metric that recovery is about: the one that was asked for, else acc_norm, else acc, else the first."""
    if not known:
        raise InputError(f"the task {name} has no metric that is a mean over documents", fix="leave the task out")
    order = PREFERRED if wanted is None else (wanted, *PREFERRED)
    return next((metric for metric in order if metric in known), known[0])


def _paired(
    name: str,
    documents: Sequence[TaskDocument],
    metrics: tuple[TaskMetrics, TaskMetrics],
    answers: tuple[Sequence[Sequence[Answer]], Sequence[Sequence[Answer]]],
    wanted: str | None,
) -> PairedTask:
    base, cand = metrics
    shared = {key: (base.per_document[key], cand.per_document[key]) for key in base.per_document}
    metric = main_metric(name, list(shared), wanted)
    sides = [[_log_probs(document, its) for document, its in zip(documents, side, strict=True)] for side in answers]
    are_known = all(document.gold is not None for document in documents)
    have_choices = all(document.choices for document in documents)
    have_wrong_choices = are_known and have_choices and not any(_all_right(document) for document in documents)

    def both(measure: Callable[[TaskDocument, Floats], float]) -> tuple[Floats, Floats]:
        """``measure`` of each document, for the baseline and for the candidate."""
        first, second = (np.array([measure(*one) for one in zip(documents, side, strict=True)]) for side in sides)
        return first, second

    with np.errstate(invalid="ignore"):
        chosen = both(partial(_choice, per_character=metric == "acc_norm")) if have_choices else None
        return PairedTask(
            name,
            metric,
            shared,
            gold=both(lambda document, found: float(found[list(document.gold or ())].max())) if are_known else None,
            margin=both(_margin) if have_wrong_choices else None,
            margin_norm=both(lambda one, found: _margin(one, found / _lengths(one))) if have_wrong_choices else None,
            kl=np.array([_divergence(*pair) for pair in zip(*sides, strict=True)]) if have_choices else None,
            changed=None if chosen is None else chosen[0] != chosen[1],
            lm_eval={key: (base.aggregates[key], cand.aggregates[key]) for key in base.aggregates},
        )


def _log_probs(document: TaskDocument, answers: Sequence[Answer]) -> Floats:
    """The log-probabilities of the choices, or of the only continuation, without others that some tasks ask for."""
    return np.array([log_prob for log_prob, _ in answers[: len(document.choices) or 1]], dtype=np.float64)


def _lengths(document: TaskDocument) -> Floats:
    return np.array([len(choice) for choice in document.choices], dtype=np.float64)


def _all_right(document: TaskDocument) -> bool:
    return set(document.gold or ()) >= set(range(len(document.choices)))


def _margin(document: TaskDocument, log_probs: Floats) -> float:
    """How far the best right choice lies above the best wrong one, in nats."""
    right = list(document.gold or ())
    return float(log_probs[right].max() - np.delete(log_probs, right).max())


def _choice(document: TaskDocument, log_probs: Floats, *, per_character: bool) -> int:
    return int((log_probs / _lengths(document) if per_character and document.choices else log_probs).argmax())


def softmax(log_probs: Sequence[float] | Floats) -> Floats:
    """Probabilities over the choices, which sum to 1; NaN if all of them have probability zero.

    >>> softmax([math.log(0.1), math.log(0.3)]).round(6).tolist()
    [0.25, 0.75]
    """
    values = np.array(log_probs, dtype=np.float64)
    top = values.max()
    if not math.isfinite(top):
        return np.full(len(values), np.nan)
    weights = np.exp(values - top)
    found: Floats = weights / weights.sum()
    return found


def _divergence(baseline: Floats, candidate: Floats) -> float:
    """KL(baseline‖candidate) over the choices of a document; NaN if one of them gives no choice a probability."""
    p, q = softmax(baseline), softmax(candidate)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * (np.log(p) - np.log(q)), np.where(np.isnan(p), np.nan, 0.0))
    return max(0.0, float(terms.sum())) if not np.isnan(terms).any() else math.nan


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def groups_of(loaded: LoadedTasks, sizes: Mapping[str, int]) -> tuple[TaskGroup, ...]:
    """Groups with the weights of their tasks, by lm-eval's definition where it has one."""
    return tuple(_group(group, sizes) for group in loaded.groups.values())


def _group(group: Any, sizes: Mapping[str, int]) -> TaskGroup:
    names = [task.task_name for task in group.get_all_tasks()]
    if group.aggregate_metric_list:
        by_size = bool(group.aggregate_metric_list[0].weight_by_size)
        parts = {name: float(sizes[name]) if by_size else 1.0 for name in names}
        total = sum(parts.values())
        return TaskGroup(group.name, {name: part / total for name, part in parts.items()})
    weights = dict.fromkeys(names, 0.0)
    children = list(group)
    for child in children:
        inner = _group(child, sizes).weights if hasattr(child, "get_all_tasks") else {child.task_name: 1.0}
        for name, weight in inner.items():
            weights[name] += weight / len(children)
    return TaskGroup(group.name, weights)  # lm-eval does not aggregate it: its members count alike
