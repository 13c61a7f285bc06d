"""May two models be compared, target by target? What they must share, and the words for what they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scoremode.errors import harmless


@dataclass(frozen=True, slots=True)
class Outline:
    """What must be equal for two models to answer the same questions."""

    tokenizer: str
    vocabulary: int | None
    plan_digest: str
    method: str
    settings: Mapping[str, Any] | None = None  # of the method, where they are known
    corpus_sha256: str | None = None  # where it is known


@dataclass(frozen=True, slots=True)
class Difference:
    """Why two models cannot be compared."""

    kind: Literal["tokenizer", "vocabulary", "text", "plan"]
    reason: str


def difference(baseline: Outline, candidate: Outline) -> Difference | None:
    """The first thing that keeps a candidate from being compared; None where nothing does."""
    if baseline.tokenizer != candidate.tokenizer:
        return Difference(
            "tokenizer", "different tokenizers: the baseline and the candidate do not have the same tokens"
        )
    if baseline.vocabulary != candidate.vocabulary:
        both = f"{baseline.vocabulary} vs {candidate.vocabulary}"
        return Difference("vocabulary", f"vocabulary {both}: distributions over other ids cannot be compared")
    if baseline.plan_digest == candidate.plan_digest:
        return None
    texts = baseline.corpus_sha256, candidate.corpus_sha256
    if None not in texts and texts[0] != texts[1]:
        return Difference("text", "other text: the baseline was scored on another corpus")
    return Difference("plan", f"other plan: {_in_what(baseline, candidate)}")


def _in_what(baseline: Outline, candidate: Outline) -> str:
    """In what two plans differ, as far as is known."""
    if baseline.method != candidate.method:
        return f"method {harmless(str(baseline.method))} vs {harmless(str(candidate.method))}"
    theirs = baseline.settings or {}
    mine = theirs if candidate.settings is None else candidate.settings
    differing = [
        f"{harmless(str(name)).replace('_', ' ')} {harmless(str(theirs.get(name)))} vs {mine.get(name)}"
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name)
    ]
    return ", ".join(differing) or "other windows or another text"
