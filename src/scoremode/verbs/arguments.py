"""Every argument of a verb by name, for people, editors and type checkers: of questions and of engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from scoremode.cluster.spread import SpreadArguments
from scoremode.engines.arguments import EngineArguments
from scoremode.verbs.question import QuestionArguments

F = TypeVar("F", bound=Callable[..., Any])


class ModelArguments(EngineArguments, SpreadArguments, total=False):
    """Options of an engine, and over how many replicas it is spread."""


class AllArguments(QuestionArguments, ModelArguments, total=False):
    """Arguments of a question, and of a model."""


def spelled_out(*groups: type) -> Callable[[F], F]:
    """Show every argument of these groups in a function's signature, for ``help()`` and completion in a notebook.

    Type checkers read them from the function's own ``**arguments: Unpack[…]``.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD, "options of other packages come in here"
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_words(kind))
            for group in groups
            for name, kind in group.__annotations__.items()
            if name not in own.parameters
        ]
        function.__signature__ = own.replace(parameters=[*parameters[:-1], *shown, parameters[-1]])  # type: ignore[attr-defined]
        return function

    return decorate


def _words(kind: Any) -> str:
    return getattr(kind, "__forward_arg__", str(kind))
