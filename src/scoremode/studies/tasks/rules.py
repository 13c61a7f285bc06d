"""Rules that fail a comparison on tasks: ``--fail-if "arc_easy.recovery < 0.99 surely"``.

rule   = [task "."] name operator number ["surely"]: see reports/gate.py
task   = a task or a group; without it, the rule is about all tasks
name   = any number of ``row_statistics``
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.reports import gate
from scoremode.studies.tasks.results import TasksComparison
from scoremode.studies.tasks.statistics import FIELDS

EXAMPLE = "write a rule such as 'recovery < 0.99 surely' or 'arc_easy.flips > 0.05'"


@dataclass(frozen=True, slots=True)
class TaskRule:
    """A rule about a task, a group, or all tasks."""

    rule: gate.Rule
    task: str | None = None

    def check(self, c: TasksComparison) -> str | None:
        """Says in one line why the gate fails for this candidate; None if it passes."""
        row, name = (c.overall, c.name) if self.task is None else (c.row(self.task), f"{c.name}, {self.task}")
        return gate.check(self.rule, {**row, "name": name}, why_unknown=why_unknown)


def parse(rule: str) -> TaskRule:
    """Parses a rule as the user typed it.

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
        (name != plain and statistics.get(plain) is not None, gate.too_few(documents, "documents")),
        (name.startswith(("acc_", "kl_", "margin", "changed")), "not all of the tasks have it"),
        ("shift" in name, "a choice has probability zero"),
    )
    return next((reason for applies, reason in reasons if applies), "it has no value")
