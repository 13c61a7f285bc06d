"""Corpus text made safe and short for a terminal: it may contain anything, even escape sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scoremode.errors import harmless
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run

NOT_MEASURED = "not measured"
VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def counted(number: int, plural: str) -> str:
    """A number and what it counts.

    >>> counted(1, "windows"), counted(1200, "windows")
    ('1 window', '1,200 windows')
    """
    return f"{number:,} {plural.removesuffix('s') if number == 1 else plural}"


def shown(text: str) -> str:
    """Text on one line, without control characters that a terminal would interpret."""
    return harmless("".join(VISIBLE.get(c, c) for c in text))


def worst_targets(run: Run, count: int) -> list[int]:
    """Indices of the targets with the lowest probability, each token of the text once."""
    order = run.scores.logprob.argsort(kind="stable")
    found: dict[int, int] = {}
    for index in order.tolist():
        found.setdefault(int(run.facts.token[index]), index)
        if len(found) == count:
            break
    return list(found.values())


def context_before(run: Run, index: int, width: int) -> str:
    """The scored text before a target, at most ``width`` characters, from the same document."""
    facts, pieces = run.facts, []
    at, size = index - 1, 0
    while at >= 0 and size < width and facts.token[at] + 1 == facts.token[at + 1]:
        if facts.document[at] != facts.document[index]:
            break
        pieces.append(str(facts.text[at]))
        size += len(pieces[-1])
        at -= 1
    return "".join(reversed(pieces))[-width:]


def top_words(comparison: Comparison) -> str:
    """Why the share of equal first choices is missing, in one line; '' if it is not missing."""
    sides = (("the baseline", comparison.baseline), (comparison.name, comparison.candidate))
    names = [name for name, run in sides if not run.scores.has("top")]
    return f"same top: {NOT_MEASURED} (no first choices from {' and '.join(names)})" if names else ""


def model_notes(run: Run) -> list[str]:
    """What a reader must know about a model as it was loaded; runs of other versions may not have it."""
    notes = run.manifest.get("model_notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def noise_words(comparison: Comparison, statistics: Mapping[str, Any]) -> str:
    """The noise floor in one line: its size and what was computed in a different way, or why it was not measured."""
    if comparison.kl is None:
        return ""  # two finished runs: there is no divergence to judge by it
    floor, words = statistics.get("noise_floor_kl_mean"), comparison.noise_perturbed
    if floor is None:
        return f"noise floor: not measured ({words or 'the run does not say why'})"
    return f"noise floor: KL mean {floor:.2g}" + (f" under: {words}" if words else "")
