"""The flags of ``scoremode cache``, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from scoremode.cli import options
from scoremode.errors import OptionError, did_you_mean

EPILOG = (
    "Runs and references without --out are kept there. SCOREMODE_CACHE is the folder, SCOREMODE_CACHE_LIMIT the size "
    "from which the least recently used go (default: 50GB; none: no limit). Nothing that is in use is removed."
)
KINDS = ("runs", "references", "models", "logs", "tasks", "texts", "files")
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="prune", nargs="?", help="remove entries (default: list them)")
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="only these; may be repeated (default: all of them)"
    )
    prune = parser.add_argument_group("prune", "at least one of the first two")
    prune.add_argument("--older-than", metavar="AGE", type=_age, help="what was not used for that long: 12h, 30d, 4w")
    prune.add_argument(
        "--larger-than",
        metavar="SIZE",
        type=_size,
        help="the least recently used, until the rest is at most that large: 500MB, 10GB",
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.cache import cache_lines, prune_lines
    from scoremode.verbs.cache import list_cache, prune_cache

    kinds = tuple(parsed.kind or ())
    if parsed.action is None:
        _refuse_flags_of_prune(parsed)
        found = list_cache(kinds)
    elif parsed.action == "prune":
        found = prune_cache(
            older_than=parsed.older_than, larger_than=parsed.larger_than, kinds=kinds, dry_run=parsed.dry_run
        )
    else:
        raise OptionError(f"scoremode cache has no '{parsed.action}'", fix=did_you_mean(parsed.action, ["prune"]))
    if parsed.json:
        options.print_json(found)
    else:
        print("\n".join((prune_lines if parsed.action else cache_lines)(found)))


def _refuse_flags_of_prune(parsed: argparse.Namespace) -> None:
    given = {"--older-than": parsed.older_than, "--larger-than": parsed.larger_than, "--dry-run": parsed.dry_run}
    for flag, value in given.items():
        if value not in (None, False):
            raise OptionError(f"{flag} belongs to prune", fix=f"type scoremode cache prune {flag} …")


def _age(text: str) -> float:
    from scoremode.cache.units import parse_age

    return _parsed(parse_age, text)


def _size(text: str) -> int:
    from scoremode.cache.units import parse_size

    return _parsed(parse_size, text)


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
