"""A command of the command line, and the flags that several share: how each is read.

Options say themselves what they do, others in shared_flags.py.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from scoremode.core import strict_json
from scoremode.core.arguments import secret_on_command_line
from scoremode.core.engine.options import HUB_TOKEN
from scoremode.core.extensions import ReplicasOffer, offered, public_names
from scoremode.core.options import KnownOption
from scoremode.core.verbs.shared_flags import ENGINE
from scoremode.core.verbs.shared_flags import Flags as Flags  # noqa: PLC0414
from scoremode.core.verbs.shared_flags import model_flag as model_flag  # noqa: PLC0414
from scoremode.errors import OptionError, shortened


class Verb:
    """A command of the command line: its help, its flags, and its work; its ``VerbEntry`` has its line of help."""

    epilog: str | None = None
    examples: tuple[str, ...] = ()  # two
    everyday: tuple[str, ...] | None = None  # flags that --help shows; None: all of them. --help-all shows all
    passes_on = False  # are flags that are not ours those of another program?
    passes_all_on = False  # are all of them? ``words`` has them
    renamed: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Commands of older versions that are part of this one: what to type now, with {} for the words after the name, and
    the words to show where none were typed."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        raise NotImplementedError

    def instead(self, flag: str) -> str | None:
        """What to type instead of a flag that the verb does not have, or no longer has; None: nothing is known."""
        return None

    def run(self, parsed: argparse.Namespace) -> int | None:
        """Does the work and prints the result; returns the exit code if it is not 0."""
        raise NotImplementedError


# ── how flags are read ───────────────────────────────────────────────────────────────────────────────────────────────
def integer(text: str) -> int:
    """Reads a whole number in plain digits, for argparse; refuses ``1e3``, ``' 5'`` and ``1_000``."""
    if not re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not a whole number, as in 512")
    if len(text) > 18:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is too large")
    return int(text)


def integers(text: str) -> int | list[int]:
    """Reads one whole number, or several with commas between them, for argparse."""
    numbers = [integer(part) for part in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


def count(text: str) -> int:
    """Reads a whole number that is not negative, for argparse."""
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def folder(text: str) -> str:
    """Refuses the name of a page as a folder of runs, for argparse: ``report -o`` is a page."""
    if text.lower().endswith((".html", ".htm")):
        problem = "is the name of a page, and runs are kept in a folder; scoremode report FOLDER -o FILE writes a page"
        raise argparse.ArgumentTypeError(f"{shortened(text)} {problem}")
    return text


def _number(text: str) -> float:
    """The number that a text stands for; NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def amount(text: str) -> float:
    """Reads a finite number that is not negative, for argparse."""
    value = _number(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not a number, as in 1 or 0.5")
    if value < 0:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is negative")
    return value


def number_within(option: KnownOption) -> Callable[[str], float]:
    """Makes a function for argparse that reads a number and checks it against the option's bounds."""

    def read(text: str) -> float:
        low, high, value = option.details.above, option.details.at_most, _number(text)
        if not ((low is None or value > low) and (high is None or value <= high)) or math.isnan(value):
            raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not a number {option.bounds()}".rstrip())
        return value

    return read


def cache_types(text: str) -> str | list[str]:
    """Reads a type of the K/V cache, or several with commas between them, for argparse.

    >>> cache_types("q8_0"), cache_types("f16,q8_0")
    ('q8_0', ['f16', 'q8_0'])
    """
    types = [part.strip() for part in text.split(",")]
    if len(types) > 1 and "" in types:
        raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not a list of types, as in f16,q8_0")
    return types if len(types) > 1 else text


WORST = {"--worst N": "worst-predicted tokens of a run to show (default: none)"}
READERS = {"N": integer, "N,…": integers, "NATS": amount, "RATIO": amount, "DIR": folder}
SHORT = {"--corpus": "-f", "--file": "-f", "--prompts": "-f", "--context-length": "-c", "--out": "-o"}
EVERYDAY_TEXT = ("--corpus", "--text", "--num-samples")
EVERYDAY_METHOD = ("--method", "--context-length", "--stride")
EVERYDAY_ENGINE = ("--engine", "--dtype")
JSON: Flags = {"--json": "print the facts for machines, and nothing else"}
CARDS: Flags = {
    "--markdown": "print the table for a model card",
    "--model-index": "print the metadata block for the Hugging Face hub",
}
COLUMNS: Flags = {"--columns NAME,…": "more statistics in the table, as in overlap,kl_reverse_mean,top5_same"}
FEW_DOCUMENTS: Flags = {
    "--few-documents": "claim things of fewer than ten effective documents too, and say how often that is false"
}
HAS_PAGES = "report" in public_names()
REPORT: Flags = {"--report FILE": "write the HTML report there"} if HAS_PAGES else {}
SEVERAL = ("corpus", "method")  # of a question: a command that asks several takes each of them again
BASELINE: Flags = {"--baseline-engine NAME": "default: --engine", "--baseline-dtype DTYPE": "default: --dtype"}


def add(parser: Any, flags: Flags, **details: Any) -> None:
    """Add flags to a parser or to one of its groups; ``details`` are arguments of ``add_argument`` for all of them."""
    for spec, about in flags.items():
        name, _, value = spec.partition(" ")
        arguments: dict[str, Any] = {"metavar": value.removesuffix(" …"), "help": about or None}
        if not value:
            arguments = {"action": "store_true", "help": about}
        elif value.endswith(" …"):
            arguments |= {"action": "append"} if name.startswith("-") else {"nargs": "+"}
        elif value in READERS:
            arguments["type"] = READERS[value]
        parser.add_argument(*([SHORT[name]] if name in SHORT else []), name, **{**arguments, **details})


def add_model(
    parser: argparse.ArgumentParser, *, several: bool = False, several_sequences: bool = False, replicas: bool = True
) -> None:
    """Add the flags for a model, for the question that it is asked, and for its engine."""
    add(parser, model_flag())
    add_question(parser, several=several, several_sequences=several_sequences)
    add_engine(parser, replicas=replicas)


def add_question(parser: argparse.ArgumentParser, *, several: bool = False, several_sequences: bool = False) -> None:
    """Add the flags of a question; with ``several``, --corpus and --method may be repeated to ask several questions.

    With ``several_sequences``, --sequences takes several numbers.
    """
    from scoremode.core.plan.question import Question

    groups = {title: parser.add_argument_group(title) for title in ("text", "method")}
    for name, option in Question.options().items():
        more: dict[str, Any] = {}
        if several and name in SEVERAL:
            more = {"help": f"{option.details.help}; may be given again"}
        elif several_sequences and name == "sequences":
            more = {"type": integers, "metavar": "N,…"}
        _add_option(groups[option.details.group or "text"], option, **more)


def add_engine(parser: argparse.ArgumentParser, *, replicas: bool = True) -> None:
    """Add ``--engine``, the options that all engines declare, and the flags for replicas."""
    from scoremode.core.engine.registry import all_options
    from scoremode.core.verbs.replicas import spread_options

    shared = parser.add_argument_group("engine")
    add(shared, ENGINE)
    groups = {}
    for engines, option in all_options().values():
        if len(engines) > 1:
            _add_option(shared, option)
            continue
        if engines[0] not in groups:
            groups[engines[0]] = parser.add_argument_group(f"engine {engines[0]}")
        _add_option(groups[engines[0]], option)
    for runner in offered(ReplicasOffer) if replicas else ():
        group = parser.add_argument_group("replicas", runner.about)
        for option in spread_options().values():
            _add_option(group, option)


def _add_option(group: argparse._ArgumentGroup, option: KnownOption, **more: Any) -> None:
    """Adds the flag of an option; ``more`` are other arguments of ``add_argument`` than those that follow from it."""
    details = option.details
    if details.instead_of_flag is not None:
        group.add_argument(option.flag, action=RefusedSecret, const=details.instead_of_flag, help=argparse.SUPPRESS)
        return
    same: dict[str, Any] = {"dest": option.name, "help": details.help}
    if option.kind == "bool":
        same |= {"action": "store_true", "default": None}
    elif option.kind == "Pairs" or details.repeated:
        same |= {"action": "append", "metavar": details.metavar}
    else:
        readers: dict[str, Any] = {"int": integer, "float": number_within(option) if option.bounds() else amount}
        is_listed = details.aliases is None and details.cache_part is None  # else argparse would refuse what is right
        same |= {"type": readers.get(option.kind, str), "metavar": details.metavar}
        same |= {"choices": details.choices} if is_listed else {}
        if details.cache_part is not None:
            same |= {"type": integers if option.kind == "int" else cache_types, "metavar": details.metavar or "TYPE"}
    short = [SHORT[option.flag]] if option.flag in SHORT else []
    group.add_argument(*short, option.flag, *details.older_flags, **{**same, **more})


class RefusedSecret(argparse.Action):
    """An argparse action that refuses a flag whose value is a secret; ``const`` says what to do instead."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise secret_on_command_line(str(option_string), str(self.const))


def _engine_arg(text: str) -> tuple[str, Any]:
    """Reads ``name=value``; the value is parsed if it is JSON, else it is text."""
    from scoremode.core.disk.manifests import is_secret

    name, equals, value = text.partition("=")
    if equals and is_secret(name):
        raise secret_on_command_line(f"--engine-arg {name}=…", HUB_TOKEN)
    if not equals or not name:
        raise OptionError(f"--engine-arg {text} is not NAME=VALUE", fix="as in --engine-arg max_num_seqs=64")
    try:
        return name, strict_json.parse(value)
    except ValueError:
        return name, value


def question(parsed: argparse.Namespace) -> dict[str, Any]:
    """The question of a command that asks exactly one."""
    all_questions = questions(parsed)
    if len(all_questions) > 1:
        flag = "--corpus" if len(parsed.corpus or ()) > 1 else "--method"
        raise OptionError(
            f"{flag} is given {len(all_questions)} times, and {parsed.verb} asks one question",
            fix="run it once for each; several files are one corpus as a folder or a pattern like 'notes/*.txt'",
        )
    return all_questions[0]


def questions(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """One question for each corpus and each method, in the order given; arguments that were not given are left out."""
    from scoremode.core.plan.question import Question

    shared = {name: getattr(parsed, name) for name in Question.options() if name not in SEVERAL}
    corpora, methods = parsed.corpus or [None], parsed.method or [None]
    for flag, values in (("--corpus", corpora), ("--method", methods)):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise OptionError(f"{flag} {shortened(twice)} is given twice", fix="give it once")
    rows = [{**shared, "corpus": corpus, "method": method} for corpus in corpora for method in methods]
    return [{name: value for name, value in row.items() if value is not None and value is not False} for row in rows]


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options of engines and of replicas that the user gave. Names and values that no engine has are refused."""
    from scoremode.core.engine.registry import all_options, check_values, find_engine
    from scoremode.core.verbs.replicas import Spread

    for name in (parsed.engine, getattr(parsed, "baseline_engine", None)):
        if name is not None:
            find_engine(name)
    options = {}
    for name, (_, option) in all_options().items():
        value = getattr(parsed, name)
        if option.kind == "Pairs" and value:
            value = tuple(_engine_arg(text) for text in value)
        if value is not None:
            options[name] = value
    check_values(options)
    spread = {name: getattr(parsed, name, None) for name in Spread.options()}
    return options | {name: value for name, value in spread.items() if value is not None}


def model_arguments(parsed: argparse.Namespace) -> dict[str, Any]:
    """The engine, the tokenizer and the engine's options: how a model is loaded."""
    return {"engine": parsed.engine, "tokenizer": parsed.tokenizer, **engine_options(parsed)}
