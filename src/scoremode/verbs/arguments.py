"""Every argument of a verb by name, for editors and type checkers: those of a question and those of the engines."""

from __future__ import annotations

from scoremode.engines.arguments import EngineArguments
from scoremode.verbs.question import QuestionArguments


class AllArguments(QuestionArguments, EngineArguments, total=False):
    """Arguments of a question, and options of an engine."""
