"""What is scored: a name, a tokenizer, a fingerprint, and whatever else is known before an engine is opened."""

from __future__ import annotations

from dataclasses import dataclass

from scoremode.models.facts import ModelFacts
from scoremode.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Subject:
    """What is scored: a model's files and tokenizer, known before an engine is started."""

    name: str
    facts: ModelFacts | None  # None for a table
    tokenizer: TextTokenizer
    vocabulary: int | None
    context_length: int | None
    fingerprint: str
