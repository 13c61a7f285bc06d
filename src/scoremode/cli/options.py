"""Flags that several verbs share, under the names that people of this field know."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scoremode import strict_json
from scoremode.errors import OptionError

if TYPE_CHECKING:
    from scoremode.engines.options import KnownOption

QUESTION = (
    "corpus",
    "text",
    "method",
    "context_length",
    "stride",
    "max_windows",
    "num_samples",
    "document_tokens",
    "field",
    "dataset",
    "dataset_config",
    "split",
    "assistant_only",
)


def integer(text: str) -> int:
    """A whole number in plain digits, for argparse: not ``1e3``, ``' 5'`` or ``1_000``."""
    if not re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"'{_cut(text)}' is not a whole number, as in 512")
    if len(text) > 18:
        raise argparse.ArgumentTypeError(f"{_cut(text)} is too large")
    return int(text)


def count(text: str) -> int:
    """A number that is not negative, for argparse."""
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def number_within(option: KnownOption) -> Callable[[str], float]:
    """A reader of numbers within an option's bounds, for argparse."""

    def read(text: str) -> float:
        low, high = option.details.above, option.details.at_most
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not ((low is None or value > low) and (high is None or value <= high)) or math.isnan(value):
            raise argparse.ArgumentTypeError(f"'{_cut(text)}' is not a number {option.bounds()}".rstrip())
        return value

    return read


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="smollm2-135m, a checkpoint folder, or a name on the hub")


def add_question(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Flags of a question; with ``several``, a corpus or a method that is given again is another question."""
    text = parser.add_argument_group("text")
    text.add_argument(
        "--corpus",
        action="append",
        metavar="TEXT",
        help="wikitext2, wikitext2:FILE, python-docs, a file (.txt .md .jsonl .parquet), a folder or a pattern "
        "('notes/*.txt') of files, or - for stdin" + ("; give it again for another question" if several else ""),
    )
    text.add_argument("--text", help="a text given here")
    text.add_argument("--dataset", metavar="NAME", help="a dataset on the Hugging Face hub")
    text.add_argument("--dataset-config", metavar="CONFIG")
    text.add_argument("--split", help="of the dataset (default: test)")
    text.add_argument("--field", help="of .jsonl or .parquet rows (default: text, or messages)")
    text.add_argument(
        "--num-samples", type=integer, metavar="N", help="only the first N rows (of one plain text: lines)"
    )
    text.add_argument("--document-tokens", type=integer, metavar="N", help="only the first N tokens of each document")
    text.add_argument("--assistant-only", action="store_true", help="of chat rows, score the assistant's tokens alone")
    rule = parser.add_argument_group("method")
    rule.add_argument(
        "--method",
        action="append",
        help="see scoremode methods (default: sliding-once)" + ("; may be given again" if several else ""),
    )
    rule.add_argument("--context-length", type=integer, metavar="N", help="tokens per window (default: the method's)")
    rule.add_argument("--stride", type=integer, metavar="N", help="tokens between windows (default: the method's)")
    rule.add_argument("--max-windows", type=integer, metavar="N", help="0 for all (default: the method's own limit)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """``--engine``, and every option of every engine, as the engines declare them."""
    from scoremode.engines.registry import all_options

    shared = parser.add_argument_group("engine")
    shared.add_argument("--engine", help="see scoremode engines (default: the one that fits the model)")
    shared.add_argument("--tokenizer", metavar="FOLDER", help="another tokenizer than the model's own")
    groups = {}
    for engines, option in all_options().values():
        if len(engines) > 1:
            _add_option(shared, option)
            continue
        if engines[0] not in groups:
            groups[engines[0]] = parser.add_argument_group(f"engine {engines[0]}")
        _add_option(groups[engines[0]], option)


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Over how many engines the work is spread, and where."""
    group = parser.add_argument_group("replicas", "several engines share the work: pip install '.[ray]'")
    group.add_argument(
        "--replicas", type=integer, metavar="N", help="engines at a time (default: one, in this process)"
    )
    group.add_argument(
        "--ray", metavar="ADDRESS", help="auto, or HOST:PORT of a Ray cluster (default: Ray is started here)"
    )
    group.add_argument("--gpus-per-replica", type=_amount, metavar="N", help="also a share (default: what it needs)")
    group.add_argument("--cpus-per-replica", type=_amount, metavar="N", help="default: 1 for each process of an engine")


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"'{_cut(text)}' is not a number, as in 1 or 0.5")
    return value


def _add_option(group: argparse._ArgumentGroup, option: KnownOption) -> None:
    details = option.details
    flags = (option.flag, *details.older_flags)
    same: dict[str, Any] = {"dest": option.name, "help": details.help}
    if option.kind == "bool":
        group.add_argument(*flags, action="store_true", default=None, **same)
    elif option.kind == "Pairs":
        group.add_argument(*flags, action="append", metavar=details.metavar, **same)
    else:
        readers: dict[str, Any] = {"int": integer, "float": number_within(option)}
        reader = readers.get(option.kind, str)
        group.add_argument(*flags, type=reader, metavar=details.metavar, choices=details.choices, **same)


def engine_arg(text: str) -> tuple[str, Any]:
    """``name=value``, the value is read as JSON if it is JSON."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OptionError(f"--engine-arg {text} is not NAME=VALUE", fix="as in --engine-arg max_num_seqs=64")
    try:
        return name, strict_json.parse(value)
    except ValueError:
        return name, value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the facts for machines, and nothing else")


def question(parsed: argparse.Namespace) -> dict[str, Any]:
    """The question of a command that asks one."""
    found = questions(parsed)
    if len(found) > 1:
        flag = "--corpus" if len(parsed.corpus or ()) > 1 else "--method"
        raise OptionError(
            f"{flag} is given {len(found)} times, and {parsed.verb} asks one question",
            fix="run it once for each; several files are one corpus as a folder or a pattern like 'notes/*.txt'",
        )
    return found[0]


def questions(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """One question for each corpus and each method, in the order given; what was not given is left out."""
    shared = {name: getattr(parsed, name) for name in QUESTION if name not in ("corpus", "method")}
    corpora, methods = parsed.corpus or [None], parsed.method or [None]
    for flag, values in (("--corpus", corpora), ("--method", methods)):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise OptionError(f"{flag} {_cut(twice)} is given twice", fix="give it once")
    asked = [{**shared, "corpus": corpus, "method": method} for corpus in corpora for method in methods]
    return [{name: value for name, value in one.items() if value is not None and value is not False} for one in asked]


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options of engines that were given, and what was said of replicas."""
    from scoremode.cluster.spread import SPREAD
    from scoremode.engines.registry import all_options

    found = {}
    for name, (_, option) in all_options().items():
        value = getattr(parsed, name)
        if option.kind == "Pairs" and value:
            value = tuple(engine_arg(text) for text in value)
        if value is not None:
            found[name] = value
    spread = {name: getattr(parsed, name, None) for name in SPREAD}
    return found | {name: value for name, value in spread.items() if value is not None}


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_parts(parts: list[Any]) -> None:
    from scoremode.report.terminal.console import console

    out = console()
    for part in parts:
        out.print(part)
