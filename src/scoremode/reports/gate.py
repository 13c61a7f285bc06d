"""Rules that fail a comparison: ``--fail-if "kl_mean > 0.02"``.

rule   = name operator number ["surely"]
name   = any number of ``Comparison.statistics``, or of the statistics that a study judges
surely = fail only if the 95 % bound is beyond the number: the lower bound for > and >=, the upper one for < and <=.
         Without ``surely`` the value itself is compared.

A statistic that was not measured fails every rule.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.core.scores.schema import DIVERGENCE, KL
from scoremode.core.statistics.comparison import BY_FIELD, FIELDS
from scoremode.core.statistics.groups import false_of_few, why_unsure
from scoremode.errors import OptionError, did_you_mean, harmless
from scoremode.reports.text import too_few

SURELY = "surely"
APART = frozenset(column.name for column in DIVERGENCE if column is not KL)
OPERATORS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    ">": (operator.gt, "above"),
    ">=": (operator.ge, "at or above"),
    "<": (operator.lt, "below"),
    "<=": (operator.le, "at or below"),
}
SHAPE = re.compile(r"\s*([^\s<>=!]+)\s*([<>=!]+)\s*([^\s<>=!]+)(?:\s+(\S.*?))?\s*")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
EXAMPLE = "write a rule such as 'kl_mean > 0.02' or 'ppl_ratio >= 1.01 surely'"

WhyUnknown = Callable[[str, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that must not hold: the gate fails if it is true for a candidate.

    >>> str(parse("kl_mean>2e-2 surely"))
    'kl_mean > 0.02 surely'
    """

    name: str
    operator: str
    limit: float
    surely: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {self.limit:.12g}" + f" {SURELY}" * self.surely


def parse(rule: str, fields: tuple[str, ...] = FIELDS, example: str = EXAMPLE) -> Rule:
    """Parses a rule as the user typed it, about one of the fields.

    >>> parse("same_top < 0.95")
    Rule(name='same_top', operator='<', limit=0.95, surely=False)
    """
    parts = SHAPE.fullmatch(rule)
    if parts is None:
        raise OptionError(f"{_quoted(rule)} is not a rule", fix=example)
    name, sign, number, word = parts.groups()
    if name not in fields:
        near = next((field for field in fields if field == f"{name.lower()}_mean"), name.replace("-", "_"))
        raise OptionError(f"there is no statistic {_quoted(name)}", fix=did_you_mean(near, fields))
    if sign not in OPERATORS:
        raise OptionError(f"{_quoted(sign)} is not an operator", fix=f"use one of {', '.join(OPERATORS)}")
    if word not in (None, SURELY):
        raise OptionError(f"{_quoted(word)} after a rule has no meaning", fix=f"only '{SURELY}' may follow a rule")
    if word == SURELY and f"{name}_stderr" not in fields:
        raise OptionError(f"{name} has no error, so '{SURELY}' does not apply", fix=f"leave out '{SURELY}'")
    return Rule(name, sign, _number(number), surely=word == SURELY)


def _number(text: str) -> float:
    value = float(text) if NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise OptionError(f"{_quoted(text)} is not a number", fix="write one such as 0.02")
    return value


def _quoted(text: str) -> str:
    return f"'{harmless(text)}'"


def check(
    rule: Rule,
    statistics: Mapping[str, Any],
    kind: str = "groups",
    why_unknown: WhyUnknown | None = None,
    *,
    few_documents: bool = False,
) -> str | None:
    """Says in one line why the gate fails for this candidate; None if it passes. ``kind``: the groups of its errors.

    ``why_unknown`` says why a statistic is None, for statistics that are not those of a comparison.

    >>> check(parse("kl_mean > 0.02"), {"name": "q4", "kl_mean": 0.0312, "kl_mean_stderr": 0.001})
    'q4: kl_mean is 0.0312, above 0.02'
    >>> check(parse("kl_mean > 0.02"), {"name": "q8", "kl_mean": 0.0004, "kl_mean_stderr": 0.0001})
    """
    why_unknown = why_unknown or _why_unknown
    who, value = harmless(str(statistics["name"])), statistics.get(rule.name)
    if value is None:
        return f"{who}: {rule.name} is not known: {why_unknown(rule.name, statistics)}"
    holds, phrase = OPERATORS[rule.operator]
    if not rule.surely:
        failed = holds(value, rule.limit)
        return f"{who}: {rule.name} is {_shown(value, rule.limit)}, {phrase} {rule.limit:.12g}" if failed else None
    side = "low" if rule.operator.startswith(">") else "high"
    bound, effective = statistics.get(f"{rule.name}_{side}"), statistics.get("groups_effective") or math.inf
    why = why_unsure(statistics.get("groups") or 0, effective, kind, few_documents=few_documents)
    if bound is None or why:
        why = why_unknown(f"{rule.name}_{side}", statistics) if bound is None else why
        return f"{who}: {rule.name} cannot be judged '{SURELY}': {why}"
    if not holds(bound, rule.limit):
        return None
    low, high = (statistics[f"{rule.name}_{end}"] for end in ("low", "high"))
    rate = false_of_few("direction", effective, kind)
    return f"{who}: {rule.name} is {value:.4g} (95 %: {low:.4g} to {high:.4g}), surely {phrase} {rule.limit:.12g}{rate}"


def _shown(value: float, limit: float) -> str:
    """Formats four digits; all digits for a count, or if four would make the value look equal to the limit."""
    short = f"{value:.4g}"
    return repr(value) if isinstance(value, int) or (short == f"{limit:.4g}" and value != limit) else short


def _why_unknown(name: str, statistics: Mapping[str, Any]) -> str:
    """Says why a statistic is None, by the first reason that applies."""
    needs, infinite = BY_FIELD[name].needs, statistics.get("kl_infinite")
    zero = sum(statistics.get(f"zero_probability_{side}") or 0 for side in ("baseline", "candidate"))
    reasons = (
        (name not in statistics, "these statistics do not have it"),
        (statistics.get("targets") == 0, "there are no targets"),
        (needs == "noise", "the noise floor was not measured"),
        (needs == "kl" and infinite is None, "KL was not measured"),
        (needs in APART and statistics.get(BY_FIELD[name].name) is None, f"{needs} was not measured, or is infinite"),
        (needs == "kl" and infinite, f"targets with infinite KL: {infinite}"),
        (needs == "top" and statistics.get("same_top") is None, "the first choices (top) of a run were not measured"),
        (needs == "logprob" and zero, f"targets with probability zero: {zero}"),
        (name.startswith("answer_") and statistics.get("answer_logprob") is None, "no target is part of an answer"),
        (name.endswith(("_stderr", "_low", "_high")), too_few(statistics.get("groups"))),
    )
    return next((reason for applies, reason in reasons if applies), "it has no value")
