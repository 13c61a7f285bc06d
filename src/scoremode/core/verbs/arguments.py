"""Every argument of a verb by name, for people, editors and type checkers: of questions and of engines.

``make format`` writes the texts below the arguments from ``shared_flags.py``, and ``engine_options.py`` from the
options of the built-in engines; a test compares them.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, cast

from scoremode.core.disk.manifests import command_without_secrets
from scoremode.core.engine.options import Pairs as Pairs  # noqa: PLC0414
from scoremode.core.engine.options import Plain as Plain  # noqa: PLC0414
from scoremode.core.engine.registry import all_options
from scoremode.core.plan.path import DecodePath, read_path
from scoremode.core.plan.recipes import find_method
from scoremode.core.text.corpus import Corpus, CorpusSource, Spec, TextArguments, check_names, default, text_arguments
from scoremode.core.text.slices import read_rules
from scoremode.core.typed import F, typed
from scoremode.core.verbs.engine_options import EngineOptionArguments as EngineOptionArguments  # noqa: PLC0414
from scoremode.core.verbs.replicas import SPREAD, SpreadArguments, spread_names
from scoremode.core.verbs.shared_flags import SHARED, with_arguments
from scoremode.errors import UnknownArgumentError, did_you_mean

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
TYPED_OF_BASELINE = ("baseline_engine", "baseline_dtype")  # arguments of the baseline alone that have flags


class QuestionArguments(TextArguments, total=False):
    """The arguments of a question: a text, and the method that scores it. All have defaults."""

    corpus: Spec | Sequence[Spec] | Corpus | CorpusSource | None
    """wikitext2, wikitext2:FILE, python-docs, a file (.txt .md .jsonl .parquet), folder, pattern, rollouts:DIR,
    answers:FILE, - for stdin"""
    method: str | None
    """see scoremode info methods (default: sliding-once)"""
    context_length: int | None
    """tokens per window (default: the method's)"""
    stride: int | None
    """tokens between windows (default: the method's)"""
    max_windows: int | None
    """0 for all (default: the method's own limit)"""
    path: str | None
    """prefill (default), or decode: one token per step, as text is generated"""
    sequences: int | Sequence[int] | None
    """windows that are decoded side by side (default: 16)"""
    prefill_tokens: int | None
    """tokens of each window that are fed at once before decoding starts (default: 1)"""
    document_tokens: int | None
    """only the first N tokens of each document"""
    assistant_only: bool | None
    """of chat rows, score the assistant's tokens alone"""
    slice: str | Sequence[str] | None
    """show the text between two markers apart; may be given again (chats: roles always)"""


QUESTION = tuple(QuestionArguments.__annotations__)
PATH = ("path", "sequences", "prefill_tokens")  # arguments of plan.path.read_path


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


def asked_path(given: Mapping[str, Any]) -> DecodePath | None:
    """Returns the path in the arguments of a question; None means the prefill path."""
    return read_path(**{name: given.get(name) for name in PATH})


def check_question(given: Mapping[str, Any], *, needs_text: bool = False) -> QuestionArguments:
    """Checks the arguments of a question before anything heavy is imported: the names, the method, the path, the text.

    An unknown name is refused, and the error suggests the nearest one. With ``needs_text``, a question without a text
    gets the default one. Where a reference or a run may bring the text, that is not known yet.
    """
    for name in given:
        if name not in QUESTION:
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, QUESTION))
    if given.get("method") is not None:
        find_method(given["method"])
    asked_path(given)
    read_rules(given.get("slice"))
    has_text = any(given.get(name) is not None for name in ("corpus", "text", "dataset"))
    asked = cast(QuestionArguments, {**given, "corpus": default()} if needs_text and not has_text else dict(given))
    corpus = asked.get("corpus")
    if (needs_text or has_text) and not isinstance(corpus, Corpus | CorpusSource):
        check_names(corpus, **text_arguments(asked))
    return asked


def command_for(verb: str, names: Sequence[object], arguments: Mapping[str, Any]) -> str:
    """The command line that asks the same, without secrets; '' if a model or a text has no name that can be typed.

    Replicas are left out: they change no number.

    >>> command_for("compare", ["table:uniform", "q4.gguf"], {"text": "a b", "n_ubatch": 16, "max_windows": None})
    "scoremode compare table:uniform q4.gguf --text 'a b' --n-ubatch 16"
    """
    words, options = list[Any](["scoremode", verb, *names]), all_options()
    for name, given in arguments.items():
        known = options[name][1] if name in options else None
        is_default = given is None or given is False or given == []
        if is_default or name in SPREAD or (known and known.details.instead_of_flag):
            continue
        if name.startswith("baseline_") and name not in TYPED_OF_BASELINE:
            return ""
        flag = known.flag if known else f"--{name.replace('_', '-')}"
        if known and known.kind == "Pairs":
            pairs = given.items() if isinstance(given, Mapping) else given
            words += [word for key, value in pairs for word in (flag, f"{key}={json.dumps(value)}")]
        elif given is True:
            words.append(flag)
        elif isinstance(given, list | tuple) and name != "corpus":
            each = given if name == "slice" else [",".join(map(str, given))]
            words += [word for one in each for word in (flag, one)]
        else:  # several texts as one corpus cannot be typed
            value = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
            words += [flag, str(value) if isinstance(value, int | float) else value]
    if not all(isinstance(word, str | PathLike) for word in words):
        return ""
    return shlex.join(command_without_secrets([fspath(word) for word in words]))


def split_arguments(
    arguments: Mapping[str, Any], *, needs_text: bool = False
) -> tuple[QuestionArguments, dict[str, Any]]:
    """Splits arguments into those of a question, which are checked, and those of an engine. Others are refused."""
    question = {name: value for name, value in arguments.items() if name in QUESTION}
    options = {name: value for name, value in arguments.items() if name not in QUESTION}
    known = [*all_options(), *spread_names()] if options else []
    for name in options:
        if name not in known:
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, [*QUESTION, *known]))
    return check_question(question, needs_text=needs_text), options
