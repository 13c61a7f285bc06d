"""Turns a task into documents, and a model's answers into metrics, both with the task's own code.

lm-eval makes the requests (``build_all_requests``), with the few-shot examples and delimiters of the task. Answers go
back to lm-eval (filters, then ``process_results``), so that the metrics are exactly lm-eval's.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.cache.task_answers import Answer
from scoremode.errors import InputError, ScoremodeError
from scoremode.harness.loading import LoadedTasks, quiet_harness, reason_of, seeded
from scoremode.values import Floats

Render = Callable[..., str]
"""Renders a chat template: a list of messages, and ``add_generation_prompt`` -> text."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskDocument:
    """One question of a task."""

    number: int  # index in its split
    pairs: tuple[tuple[str, str], ...]  # (context, continuation), as they are sent to a model
    choices: tuple[str, ...]  # as the task lists them; empty if there is only one continuation
    gold: tuple[int, ...] | None  # right choices; None if the document names none of its choices
    instances: tuple[Any, ...]  # lm-eval's own objects

    @property
    def contexts_differ(self) -> bool:
        """Do the choices differ in their contexts, and share one continuation?"""
        return len({context for context, _ in self.pairs}) > 1


def build_documents(loaded: LoadedTasks, name: str, render: Render | None = None) -> list[TaskDocument]:
    """Returns the documents of a task, in the order of its split."""
    task = loaded.tasks[name]
    task.set_fewshot_seed(seed=1234)  # each call draws the same examples
    try:
        # hides tqdm's bar on standard error, because lm-eval has no other switch for it here
        with quiet_harness(), seeded(), contextlib.redirect_stderr(io.StringIO()):
            task.build_all_requests(
                limit=loaded.wanted.limit, apply_chat_template=render is not None, chat_template=render
            )
            by_number: dict[int, list[Any]] = {}
            for instance in task.instances:
                by_number.setdefault(instance.doc_id, []).append(instance)
            found = [_document(task, number, instances) for number, instances in by_number.items()]
            _require_right_choices(task, name, found)
            return found
    except ScoremodeError:
        raise
    except Exception as error:
        raise InputError(
            f"lm-eval cannot make questions of the task {name} ({reason_of(error)})", fix="check the fields of its rows"
        ) from None


def judges_itself(task: Any) -> bool:
    """Does the task have its own rule for right and wrong, instead of lm-eval's?"""
    return callable(getattr(getattr(task, "config", None), "process_results", None))


def _require_right_choices(task: Any, name: str, documents: Sequence[TaskDocument]) -> None:
    """Refuses a split whose labels are hidden, because every model would score 0 % on it."""
    if documents and all(one.gold is None for one in documents) and not judges_itself(task):
        raise InputError(
            f"no document of the task {name} names one of its choices as right", fix="use a split that has labels"
        )


def _document(task: Any, number: int, instances: list[Any]) -> TaskDocument:
    instances.sort(key=lambda one: one.idx)
    pairs = tuple((str(one.args[0]), str(one.args[1])) for one in instances)
    doc = instances[0].doc
    choices: tuple[str, ...] = ()
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = tuple(map(str, task.doc_to_choice(doc)))
        name = task.config.task
        if len(choices) < 2:
            raise InputError(f"document {number} of {name} has {len(choices)} choices", fix="correct its row")
        if "" in choices:  # lm-eval would divide its log-probability by a length of 0
            which = choices.index("") + 1
            raise InputError(f"choice {which} of document {number} of {name} is empty", fix="correct its row")
    return TaskDocument(number, pairs, choices, _gold(task, doc, choices), tuple(instances))


def _gold(task: Any, doc: Any, choices: Sequence[str]) -> tuple[int, ...] | None:
    """Returns the numbers of the right choices, as ``process_results`` finds them; None if the document names none.

    lm-eval counts a document without a right choice as wrong, whatever a model answers.
    """
    if not choices:
        return (0,)
    right = task.doc_to_text(doc) if getattr(task, "multiple_input", 0) else task.doc_to_target(doc)
    found = []
    for one in right if isinstance(right, list) else [right]:
        number = choices.index(one) if isinstance(one, str) and one in choices else one
        if isinstance(number, int) and 0 <= number < len(choices):
            found.append(int(number))  # True is 1, as for lm-eval
    return tuple(found) or None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class TaskMetrics:
    """The metrics that lm-eval computes from one model's answers to a task."""

    per_document: Mapping[str, Floats]  # by name: (n,), for metrics that are means over documents, larger is better
    aggregates: Mapping[str, float]  # every metric that is one number, as lm-eval prints it


def metrics_of(task: Any, documents: Sequence[TaskDocument], answers: Sequence[Sequence[Answer]]) -> TaskMetrics:
    """Computes the task's own metrics. ``answers[i]`` are the answers to document i, in the order of its pairs."""
    from lm_eval.api.metrics import mean

    for document, its in zip(documents, answers, strict=True):
        for instance, (log_prob, greedy) in zip(document.instances, its, strict=True):
            instance.resps, instance.filtered_resps = [(log_prob, bool(greedy))], {}
    items: dict[str, list[Any]] = {}
    means: dict[str, Floats] = {}
    aggregates: dict[str, float] = {}
    with quiet_harness(), np.errstate(all="ignore"):
        task.apply_filters()
        for key in documents[0].instances[0].filtered_resps:
            for document in documents:
                results = [one.filtered_resps[key] for one in document.instances]
                for metric, value in task.process_results(document.instances[0].doc, results).items():
                    items.setdefault(metric if key == "none" else f"{metric},{key}", []).append(value)
        how, better = task.aggregation(), task.higher_is_better()
        for name, values in items.items():
            metric = name.split(",")[0]
            aggregate = how.get(metric, mean)
            value = aggregate(values)
            if isinstance(value, int | float | np.number):
                aggregates[name] = float(value)
            are_numbers = all(isinstance(v, int | float | np.number | np.bool_) for v in values)
            if aggregate is mean and better.get(metric) is True and len(values) == len(documents) and are_numbers:
                means[name] = np.array(values, dtype=np.float64)
    return TaskMetrics(means, aggregates)
