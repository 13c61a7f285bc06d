"""Decide whether two models can be compared target by target, and say what differs if they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scoremode.errors import harmless


@dataclass(frozen=True, slots=True)
class Outline:
    """What must be equal for two models to be comparable."""

    tokenizer: str
    vocabulary: int | None
    plan_digest: str
    method: str
    settings: Mapping[str, Any] | None = None  # of the method, if they are known
    corpus_sha256: str | None = None  # if it is known


@dataclass(frozen=True, slots=True)
class Difference:
    """Why two models cannot be compared."""

    kind: Literal["tokenizer", "vocabulary", "text", "plan"]
    reason: str


def difference(baseline: Outline, candidate: Outline) -> Difference | None:
    """The first thing that makes two models incomparable; None if they can be compared."""
    if baseline.tokenizer != candidate.tokenizer:
        return Difference(
            "tokenizer", "different tokenizers: the baseline and the candidate do not have the same tokens"
        )
    if baseline.vocabulary != candidate.vocabulary:
        both = f"{baseline.vocabulary} vs {candidate.vocabulary}"
        return Difference("vocabulary", f"vocabulary {both}: distributions over different ids cannot be compared")
    if baseline.plan_digest == candidate.plan_digest:
        return None
    texts = baseline.corpus_sha256, candidate.corpus_sha256
    if None not in texts and texts[0] != texts[1]:
        return Difference("text", "different texts: the baseline was scored on another corpus")
    return Difference("plan", f"different plans: {_plan_difference(baseline, candidate)}")


def _plan_difference(baseline: Outline, candidate: Outline) -> str:
    """How two plans differ, as far as it is known."""
    if baseline.method != candidate.method:
        return f"method {harmless(str(baseline.method))} vs {harmless(str(candidate.method))}"
    theirs = baseline.settings or {}
    mine = theirs if candidate.settings is None else candidate.settings
    differing = [
        f"{harmless(str(name)).replace('_', ' ')} {harmless(str(theirs.get(name)))} vs {mine.get(name)}"
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name)
    ]
    return ", ".join(differing) or "different windows or texts"
