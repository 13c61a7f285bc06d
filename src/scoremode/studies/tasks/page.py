"""The HTML page of comparisons on tasks: a table, and the documents that flipped.

Questions and choices come from untrusted files, so the template escapes them. The page needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from scoremode.reports.html.page import ResultPage, distinct_commands
from scoremode.reports.html.templating import fill, fill_page
from scoremode.reports.served import known, pairs, served_facts
from scoremode.reports.text import in_title
from scoremode.studies.tasks.results import Flip, TasksComparison, shares
from scoremode.studies.tasks.tables import tasks_blocks, tasks_notes, tasks_table

FLIPS_SHOWN = 25  # documents per task and candidate; a page with thousands would not open on a phone
LONGEST_QUESTION, LONGEST_CHOICE = 1500, 600  # characters; a question's end is shown, because examples come first


def render_tasks(comparisons: Sequence[TasksComparison]) -> str:
    first, names = comparisons[0], [c.name for c in comparisons]
    models = [("baseline", first.baseline), *((c.name, c.candidate) for c in comparisons)]
    facts = [(name, None, _model_facts(m)) for name, m in models]
    commands = distinct_commands(comparisons)
    return fill_page(
        "tasks.html",
        about=[_about(c) for c in comparisons],
        title=f"{in_title(names)} against {first.baseline_name} on tasks",
        best=max(comparisons, key=lambda c: -math.inf if c.overall["recovery"] is None else c.overall["recovery"]),
        tasks=len(first.tasks),
        baseline=first.baseline_name,
        candidates=[(c.name, _flips(c)) for c in comparisons],
        blocks=[tasks_table(comparisons), *tasks_notes(comparisons)],
        most=FLIPS_SHOWN,
        provenance=fill("provenance.html", commands=commands, first=("Tasks", _task_facts(first)), runs=facts),
    )


def _about(c: TasksComparison) -> list[object]:
    """What was asked of which models: by their fingerprints, or by their answers if there are none."""
    models = [(m.get("model"), m.get("model_fingerprint") or m.get("samples")) for m in (c.baseline, c.candidate)]
    return ["tasks", c.settings, [task.name for task in c.tasks], models]


def _flips(c: TasksComparison) -> list[dict[str, object]]:
    sections = []
    for task, of_task in groupby(c.flips(), key=lambda flip: flip.task):
        flips = list(of_task)
        lost = sum(not flip.gained for flip in flips)
        title = f"{task}: {lost:,} lost, {len(flips) - lost:,} gained"
        sections.append({"title": title, "count": len(flips), "shown": [_flip(flip) for flip in flips[:FLIPS_SHOWN]]})
    return sections


def _flip(flip: Flip) -> dict[str, object]:
    document = flip.document
    context = "" if document.chosen_in_context else document.pairs[0][0]
    question = context if len(context) <= LONGEST_QUESTION else f"…{context[-LONGEST_QUESTION:]}"
    sides = list(zip((flip.baseline, flip.candidate), flip.chosen, strict=True))
    choices = []
    for i in range(len(flip.baseline)):
        text = document.choices[i] if document.choices else document.pairs[0][1]
        cut = f"…{text[-LONGEST_CHOICE:]}" if document.chosen_in_context else f"{text[:LONGEST_CHOICE]}…"
        answers = [(_share(side, i) if document.choices else "", chosen == i, _nats(side[i])) for side, chosen in sides]
        shown = text if len(text) <= LONGEST_CHOICE else cut
        choices.append({"text": shown, "right": i in (document.gold or ()), "answers": answers})
    return {"gained": flip.gained, "number": document.number, "question": question, "choices": choices}


def _share(log_probs: Sequence[float], choice: int) -> str:
    share = shares(log_probs)[choice]
    return f"{100 * share:.1f}% " if math.isfinite(share) else ""


def _nats(log_prob: float) -> str:
    return f"{log_prob:.3f} nats".replace("-", "−") if math.isfinite(log_prob) else "probability 0"


def _model_facts(m: Mapping[str, Any]) -> dict[str, str]:
    logs = ", ".join(f"{name} (sha256 {sha256[:12]})" for name, sha256 in m.get("samples", {}).items())
    names = {"model": "model", "model sha256": "model_fingerprint", "revision": "model_revision"}
    return known({**{title: m.get(name) for title, name in names.items()}, "logs": logs, **served_facts(m)})


def _task_facts(c: TasksComparison) -> dict[str, str]:
    s = c.settings
    chat = {True: "applied", False: "not applied"}
    facts = {
        "lm-eval": s["lm_eval"],
        "documents": None if s["limit"] is None else f"not all: --limit {s['limit']}",
        "few-shot examples": pairs(s["num_fewshot"]),
        "versions of the tasks": pairs({task.name: task.version for task in c.tasks}),
        "chat template": chat.get(s["apply_chat_template"]),
        "seeds": pairs(s["seeds"]),
    }
    return known(facts)


REFUSAL = ("comparisons on tasks and on texts do not share a page", "write two reports")
PAGE = ResultPage(render_tasks, REFUSAL, several=True, blocks=lambda c: tasks_blocks([c]))
