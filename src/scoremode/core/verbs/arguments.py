"""The arguments of a verb by name: those of a question, and those of a model.

What editors and type checkers read of them is in argument_types.py, which ``make format`` writes from the declarations.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from scoremode.core.disk.manifests import command_without_secrets
from scoremode.core.engine.registry import all_options
from scoremode.core.options import KnownOption
from scoremode.core.plan.question import Question
from scoremode.core.typed import F, typed
from scoremode.core.verbs.argument_types import EngineOptionArguments, QuestionArguments, SpreadArguments
from scoremode.core.verbs.replicas import Spread, spread_options
from scoremode.core.verbs.shared_flags import SHARED, with_arguments
from scoremode.errors import UnknownArgumentError, did_you_mean

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
TYPED_OF_BASELINE = ("baseline_engine", "baseline_dtype")  # arguments of the baseline alone that have flags


class ModelArguments(EngineOptionArguments, SpreadArguments, total=False):
    """Options of an engine, and of the replicas that it is spread over."""


class AllArguments(QuestionArguments, ModelArguments, total=False):
    """Arguments of a question, and of a model."""


def spelled_out(*groups: type) -> Callable[[F], F]:
    """Show every argument of these groups in a function's signature, for ``help()`` and completion in a notebook.

    Type checkers read them from the function's own ``**arguments: Unpack[…]``, from which they are checked as well.
    """

    def decorate(function: F) -> F:
        function = typed(function)
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD, "options of other packages come in here"
        shown = [
            inspect.Parameter(name, KEYWORD_ONLY, default=None, annotation=getattr(kind, "__forward_arg__", str(kind)))
            for group in groups
            for name, kind in group.__annotations__.items()
            if name not in own.parameters
        ]
        function.__signature__ = own.replace(parameters=[*parameters[:-1], *shown, parameters[-1]])  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # as under python -OO
            names = [name for name in own.parameters if name in SHARED] + [parameter.name for parameter in shown]
            function.__doc__ = with_arguments(function.__doc__, names)
        return function

    return decorate


def read_arguments(arguments: Mapping[str, Any]) -> tuple[Question, dict[str, Any]]:
    """The question in the arguments of a verb, and the options of a model. A name that is neither is refused."""
    fields = Question.options()
    options = {name: value for name, value in arguments.items() if name not in fields}
    known = [*all_options(), *spread_options()] if options else []
    for name in options:
        if name not in known:
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, [*fields, *known]))
    return Question.of({name: value for name, value in arguments.items() if name in fields}), options


def command_for(verb: str, names: Sequence[object], arguments: Mapping[str, Any]) -> str:
    """The command line that asks the same, without secrets; '' if a model or a text has no name that can be typed.

    Replicas are left out: they change no number.

    >>> command_for("compare", ["table:uniform", "q4.gguf"], {"text": "a b", "n_ubatch": 16, "max_windows": None})
    "scoremode compare table:uniform q4.gguf --text 'a b' --n-ubatch 16"
    """
    typed_words: list[Any] = ["scoremode", verb, *names]
    options = {name: option for name, (_, option) in all_options().items()} | Question.options()
    for name, value in arguments.items():
        option = options.get(name)
        is_default = value is None or value is False or value == []
        if is_default or name in Spread.options() or (option and option.details.instead_of_flag):
            continue
        if name.startswith("baseline_") and name not in TYPED_OF_BASELINE:
            return ""
        typed_words += _typed(option, option.flag if option else f"--{name.replace('_', '-')}", value)
    if not all(isinstance(word, str | PathLike) for word in typed_words):
        return ""
    return shlex.join(command_without_secrets([fspath(word) for word in typed_words]))


def _typed(option: KnownOption | None, flag: str, value: Any) -> list[Any]:
    """The words of one option; not all are text if the value cannot be typed."""
    if option and option.kind == "Pairs":
        pairs = value.items() if isinstance(value, Mapping) else value
        return [word for key, each in pairs for word in (flag, f"{key}={json.dumps(each)}")]
    if value is True:
        return [flag]
    if isinstance(value, list | tuple) and option and option.name == "slice":
        return [word for each in value for word in (flag, each)]
    if isinstance(value, list | tuple) and not (option and option.details.repeated):
        return [flag, ",".join(map(str, value))]
    # several texts as one corpus cannot be typed
    single = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return [flag, str(single) if isinstance(single, int | float) else single]
