"""Two models on the same documents: a value that statistics, tables and the report are made from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from scoremode.core.scores.frames import ArrowTable, few_lines
from scoremode.core.typed import typed
from scoremode.errors import InputError, OptionError, did_you_mean
from scoremode.reports import gate
from scoremode.reports.text import too_few
from scoremode.studies.tasks.logs import AGAIN, MEANS, LoggedModel, LoggedResults, LoggedTask, TaskDocument
from scoremode.studies.tasks.statistics import FIELDS, Pair, PairedTask, Parts, row_statistics
from scoremode.values import Floats, rounded

ALL = "all"  # the name of the row over everything
ALIKE = "run lm-eval for both with the same version, data, --num_fewshot, --apply_chat_template, --limit and seeds"


Groups = Mapping[str, Mapping[str, float]]
"""Groups as lm-eval defines them: by name the weight of each task, which sum to 1."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A document that one model answers right and the other wrong."""

    task: str
    document: TaskDocument
    gained: bool
    baseline: tuple[float, ...]  # log-probabilities of the choices; none if texts were generated
    candidate: tuple[float, ...]
    chosen: tuple[int | None, int | None]  # by baseline and candidate; None: one continuation, or not known


@dataclass(frozen=True, eq=False)
class TasksComparison(ArrowTable):
    """The comparison of a candidate with a baseline on tasks.

    ``rows`` has one dict per task, per group and over all: see docs/tasks.md. As a table, it has these rows.
    """

    name: str  # of the candidate, unique among those that are compared together
    baseline_name: str
    tasks: tuple[PairedTask, ...]
    groups: Groups
    top: tuple[str, ...]  # tasks and groups that are in no other group, which count alike over all
    baseline: Mapping[str, Any]  # the model, its engine and settings
    candidate: Mapping[str, Any]
    settings: Mapping[str, Any]  # how tasks were asked: limit, examples, seeds, versions
    notes: tuple[str, ...]
    manifest: Mapping[str, Any]  # command

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the tasks, then of the groups, then the overall row."""
        rows = [row_statistics(task.name, "task", [(task, 1.0)]) for task in self.tasks]
        rows += [row_statistics(name, "group", self._parts(weights)) for name, weights in self.groups.items()]
        return [*rows, row_statistics(ALL, "all", self._parts(self.weights))]

    def to_arrow(self) -> Any:
        import pyarrow as pa

        return pa.Table.from_pylist(self.rows)

    def __repr__(self) -> str:
        row = self.overall
        estimate = " ".join(rounded(row["recovery"], row["recovery_stderr"])).rstrip()
        recovery = f"recovery {estimate}" if row["recovery"] is not None else ""
        return few_lines(
            f"Comparison of {self.name} with {self.baseline_name} on {len(self.tasks)} tasks",
            recovery,
            ", ".join(task.name for task in self.tasks),
        )

    @property
    def overall(self) -> dict[str, Any]:
        return self.rows[-1]

    @typed
    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["name"] == name)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each task over all: each name asked for weighs the same, and a group divides its share."""
        weights = dict.fromkeys((task.name for task in self.tasks), 0.0)
        for name in self.top:
            for task, weight in self.groups.get(name, {name: 1.0}).items():
                weights[task] += weight / len(self.top)
        return weights

    def _parts(self, weights: Mapping[str, float]) -> Parts:
        return [(task, weights[task.name]) for task in self.tasks if weights.get(task.name)]

    def flips(self) -> Iterator[Flip]:
        """Documents that only one of the models answers right, task by task."""
        for task in self.tasks:
            base, cand = task.metrics[task.metric]
            for i in np.flatnonzero((base != cand) & np.isin(base, (0, 1)) & np.isin(cand, (0, 1))).tolist():
                before, after = (
                    () if side is None else tuple(side[i].tolist()) for side in (task.baseline, task.candidate)
                )
                chosen = (None, None) if task.chosen is None else (int(task.chosen[0][i]), int(task.chosen[1][i]))
                yield Flip(task.name, task.documents[i], bool(cand[i] > base[i]), before, after, chosen)


# ── made of logs ─────────────────────────────────────────────────────────────────────────────────────────────────────
def pair_task(base: LoggedTask, cand: LoggedTask, wanted: str | None) -> PairedTask:
    """Pairs two models' results of a task, document by document. ``wanted``: a metric that was asked for."""
    documents = _same_documents(base, cand)
    shared = {key: (base.metrics[key], cand.metrics[key]) for key in base.metrics if key in cand.metrics}
    task = PairedTask(
        base.name,
        main_metric(base.name, list(shared), wanted),
        shared,
        documents=documents,
        baseline=base.log_probs,
        candidate=cand.log_probs,
        shots=base.shots,
        version=base.version,
    )
    if base.log_probs is None or cand.log_probs is None:
        return task
    return _with_choices(task, base.log_probs, cand.log_probs)


def _same_documents(base: LoggedTask, cand: LoggedTask) -> list[TaskDocument]:
    """The documents of both, each with the right choices as both logs know them."""
    ours, theirs = ({document.number for document in side.documents} for side in (base, cand))
    if ours != theirs:
        alone = f"{len(ours - theirs):,} documents are in the baseline alone, {len(theirs - ours):,} in the candidate"
        raise InputError(f"{base.name}: {alone}", fix=ALIKE)
    documents = []
    for first, second in zip(base.documents, cand.documents, strict=True):
        both = zip((*first.hashes, first.pairs), (*second.hashes, second.pairs), strict=True)
        for part, (left, right) in zip(("text", "prompt", "target", "list of choices"), both, strict=True):
            if left != right:
                raise InputError(f"{base.name}: document {first.number} has another {part} in the candidate", fix=ALIKE)
        gold = first.gold if first.gold == second.gold else None
        if first.chosen_in_context and None in (first.gold, second.gold):
            gold = first.gold or second.gold  # each log knows it where its model was right
        documents.append(replace(first, gold=gold))
    return documents


def main_metric(name: str, metrics: Sequence[str], wanted: str | None) -> str:
    """The metric that recovery is about: the one that was asked for, else acc_norm, else acc, else the first."""
    if not metrics:
        raise InputError(f"the task {name} has no metric that is a mean over documents", fix="name others with --tasks")
    order = MEANS if wanted is None else (wanted, *MEANS)
    return next((metric for metric in order if metric in metrics), metrics[0])


def _with_choices(task: PairedTask, *sides: Sequence[Floats]) -> PairedTask:
    """A task with what the log-probabilities of its choices say under both models."""
    documents = task.documents
    are_known = all(document.gold for document in documents)
    have_choices = all(len(document.pairs) > 1 for document in documents)
    have_wrong_choices = are_known and have_choices and all(len({*(d.gold or ())}) < len(d.pairs) for d in documents)

    def both(measure: Callable[[TaskDocument, Floats], float]) -> Pair:
        """``measure`` of each document, for the baseline and for the candidate."""
        first, second = (np.array([measure(*pair) for pair in zip(documents, side, strict=True)]) for side in sides)
        return first, second

    with np.errstate(invalid="ignore", divide="ignore"):
        per_character = task.metric == "acc_norm"
        chosen = both(partial(_choice, per_character=per_character)) if have_choices else None
        if chosen is not None and per_character and not _gives(chosen, task):
            chosen = None
        return replace(
            task,
            gold=both(lambda document, probs: float(probs[list(document.gold or ())].max())) if are_known else None,
            margin=both(_margin) if have_wrong_choices else None,
            kl=np.array([_divergence(*pair) for pair in zip(*sides, strict=True)]) if have_choices else None,
            chosen=chosen,
        )


def _gives(chosen: Pair, task: PairedTask) -> bool:
    """Do these choices give lm-eval's own metric? Not if it counted other characters than ours."""
    each = zip(chosen, task.metrics[task.metric], strict=True)
    right = [[choice in (d.gold or ()) for choice, d in zip(side, task.documents, strict=True)] for side, _ in each]
    return all(d.gold for d in task.documents) and np.array_equal(right, task.metrics[task.metric])


def _margin(document: TaskDocument, log_probs: Floats) -> float:
    """How far the best right choice lies above the best wrong one, in nats."""
    right = list(document.gold or ())
    return float(log_probs[right].max() - np.delete(log_probs, right).max())


def _choice(document: TaskDocument, log_probs: Floats, *, per_character: bool) -> int:
    return int((log_probs / list(map(len, document.choices)) if per_character else log_probs).argmax())


def shares(log_probs: Sequence[float] | Floats) -> Floats:
    """Probabilities over the choices, which sum to 1; NaN if all of them have probability zero."""
    from scipy.special import softmax

    with np.errstate(invalid="ignore"):
        probabilities: Floats = softmax(np.array(log_probs, dtype=np.float64))
    return probabilities


def _divergence(baseline: Floats, candidate: Floats) -> float:
    """KL(baseline‖candidate) over the choices of a document; NaN if one of them gives no choice a probability."""
    p, q = shares(baseline), shares(candidate)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * (np.log(p) - np.log(q)), np.where(np.isnan(p), np.nan, 0.0))
    return max(0.0, float(terms.sum())) if not np.isnan(terms).any() else math.nan


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def groups_of(sides: Sequence[LoggedModel], sizes: Mapping[str, int]) -> tuple[Groups, list[str]]:
    """Groups whose tasks are all compared, with the weights of their tasks, and what to note about them."""
    groups, notes = dict[str, Mapping[str, float]](), list[str]()
    for results in {id(file): file for file in sides[0].results.values()}.values():
        children = {name: subtasks for name, subtasks in results.group_subtasks.items() if subtasks}
        for name in children:
            tasks = sorted(_leaves(name, children))
            if not all(task in sizes and sides[0].results.get(task) is results for task in tasks):
                continue
            total = sum(sizes[task] for task in tasks)
            by_size, alike = {task: sizes[task] / total for task in tasks}, dict.fromkeys(tasks, 1 / len(tasks))
            matches = [weights for weights in (by_size, alike) if _gives_aggregates(name, weights, sides)]
            groups[name] = matches[0] if matches else alike
            if not matches:
                notes.append(f"{name}: the log does not show the weights of this group; its tasks count alike")
    return groups, notes


def _leaves(name: str, children: Mapping[str, Sequence[str]], above: tuple[str, ...] = ()) -> set[str]:
    """The tasks in a group and in its groups."""
    if name in above:
        raise InputError(f"the group {name} contains itself in a results file of lm-eval", fix=AGAIN)
    if name not in children:
        return {name}
    return {task for child in children[name] for task in _leaves(child, children, (*above, name))}


def _gives_aggregates(name: str, weights: Mapping[str, float], sides: Sequence[LoggedModel]) -> bool:
    """Do these weights give the aggregates that lm-eval printed for the group?"""
    agree = list[bool]()
    for side in sides:
        results = side.results.get(next(iter(weights)), LoggedResults())
        each = {task: results.aggregates(task) for task in weights}
        for metric, value in results.aggregates(name).items():
            if all(metric in aggregates for aggregates in each.values()):
                mean = sum(weights[task] * aggregates[metric] for task, aggregates in each.items())
                agree.append(math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12))
    return bool(agree) and all(agree)


def top_of(tasks: Sequence[str], groups: Groups) -> tuple[str, ...]:
    """Groups and tasks that are in no other group."""
    members = {name: weights.keys() for name, weights in groups.items()}
    outer = [name for name in groups if not any(members[name] < others for others in members.values())]
    inside = {task for weights in groups.values() for task in weights}
    return (*outer, *(task for task in tasks if task not in inside))


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────
EXAMPLE = "write a rule such as 'recovery < 0.99 surely' or 'arc_easy.flips > 0.05'"


@dataclass(frozen=True, slots=True)
class TaskRule:
    """A rule about a task, a group, or all tasks."""

    rule: gate.Rule
    task: str | None = None

    def check(self, c: TasksComparison) -> str | None:
        """Says in one line why the gate fails for this candidate; None if it passes."""
        row = next((row for row in c.rows if row["name"] == (self.task or ALL)), None)
        if row is None:
            names = [row["name"] for row in c.rows]
            raise OptionError(f"the task '{self.task}' is not compared here", fix=did_you_mean(self.task or "", names))
        name = c.name if self.task is None else f"{c.name}, {self.task}"
        return gate.check(self.rule, {**row, "name": name}, why_unknown=why_unknown)


def parse(rule: str) -> TaskRule:
    """Parses a rule as the user typed it: [task or group "."] name operator number ["surely"], as in reports/gate.py.

    >>> parse("arc_easy.flips>0.05").task
    'arc_easy'
    """
    parts = gate.SHAPE.fullmatch(rule)
    task, dot, _ = parts[1].rpartition(".") if parts else ("", "", "")
    bare = rule if parts is None or not dot else rule[: parts.start(1)] + rule[parts.start(1) + len(task) + 1 :]
    return TaskRule(gate.parse(bare, FIELDS, EXAMPLE), task or None)


def why_unknown(name: str, statistics: Mapping[str, Any]) -> str:
    """Says why a number of a row is None, by the first reason that applies."""
    documents, baseline = statistics.get("documents"), statistics.get("accuracy_baseline")
    plain = re.sub("_(stderr|low|high)$", "", name)
    reasons = (
        ("recovery" in name and baseline == 0, "the baseline has nothing right"),
        (name != plain and statistics.get(plain) is not None, too_few(documents, "documents")),
        (name.startswith(("acc_", "kl_", "margin", "changed")), "not all of the tasks have it"),
        ("shift" in name, "a choice has probability zero"),
    )
    return next((reason for applies, reason in reasons if applies), "it has no value")
