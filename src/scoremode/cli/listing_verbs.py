"""The verbs that list what is there: methods, engines, doctor, show and cache. Their flags, and what they print."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from scoremode.core.cache.units import parse_age, parse_size
from scoremode.errors import OptionError, did_you_mean
from scoremode.reports.command import flags
from scoremode.reports.command.output import print_blocks, print_json, show
from scoremode.reports.command.verb import Verb

KINDS = ("runs", "references", "attributions", "models", "logs", "tasks", "texts", "files", "tokenizers")
METHOD_FACTS = ("name", "summary", "context", "stride", "max_windows", "average", "special", "arrangement")
T = TypeVar("T")


class MethodsVerb(Verb):
    summary = "the named recipes, or one of them with its windows drawn"
    examples = (
        "scoremode methods",
        "scoremode methods gptq",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"name METHOD": "show this one with its windows drawn"}, nargs="?")
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.plan.recipes import Method, find_method, methods
        from scoremode.reports.table import Fact, Facts

        def facts(method: Method) -> dict[str, Any]:
            return {name: getattr(method, name) for name in METHOD_FACTS} | {"drawn": inspect.getdoc(method.windows)}

        chosen = [find_method(parsed.name)] if parsed.name is not None else list(methods().found.values())
        if parsed.json:
            print_json([facts(method) for method in chosen])
        elif parsed.name is not None:
            without = f"{chosen[0].summary}\n(its windows are drawn in a docstring, which python -OO removes)"
            sys.stdout.write(f"{inspect.getdoc(chosen[0].windows) or without}\n")
        else:
            refused = [Fact(one.name, f"cannot be used: {one.problem}") for one in methods().refused]
            print_blocks([Facts([*(Fact(m.name, m.summary) for m in chosen), *refused], bold=True)])


class EnginesVerb(Verb):
    summary = "the engines on this machine"
    examples = (
        "scoremode engines",
        "scoremode engines --json",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.cli.doctor import list_engines
        from scoremode.reports.installation import engines_facts

        found = list_engines()
        show(parsed, lambda: found, lambda: [engines_facts(found)])


class DoctorVerb(Verb):
    summary = "versions, devices, and a self-test of every installed engine"
    examples = (
        "scoremode doctor",
        "scoremode doctor --engine transformers",
    )
    epilog = (
        "Exit code 2, with one line, if a self-test fails. Engines with processes of their own take up to a minute."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--engine", help="test this one alone (default: all that are installed)")
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.cli.doctor import examine, require_good
        from scoremode.reports.installation import doctor_facts

        found = examine(parsed.engine)
        show(parsed, lambda: found, lambda: [doctor_facts(found)])
        require_good(found)


class ShowVerb(Verb):
    summary = "a run that was kept with --out"
    examples = (
        "scoremode show runs/base",
        "scoremode show runs/base --worst 20",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"run_folder RUN": "a folder written with --out"})
        flags.add_worst(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.store.runs import load
        from scoremode.reports.runs import run_blocks

        found = load(parsed.run_folder)
        show(parsed, found.summary, lambda: run_blocks(found, parsed.worst))


class CacheVerb(Verb):
    summary = "what is kept in the cache folder; scoremode cache prune removes from it"
    examples = (
        "scoremode cache",
        "scoremode cache prune --older-than 30d --dry-run",
    )
    epilog = (
        "Runs and references without --out are kept there. SCOREMODE_CACHE is the folder, SCOREMODE_CACHE_LIMIT the "
        "size from which the least recently used go (default: 50GB; none: no limit). Nothing that is in use is removed."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"action prune": "remove entries (default: list them)"}, nargs="?")
        kinds = "only these; may be repeated (default: all of them)"
        parser.add_argument("--kind", choices=KINDS, action="append", help=kinds)
        prune = parser.add_argument_group("prune", "at least one of the first two")
        flags.add(
            prune, {"--older-than AGE": "what was not used for that long: 12h, 30d, 4w"}, type=_refusing(parse_age)
        )
        larger = "the least recently used, until the rest is at most that large: 500MB, 10GB"
        flags.add(prune, {"--larger-than SIZE": larger}, type=_refusing(parse_size))
        flags.add(prune, {"--dry-run": "say what would be removed, and remove nothing"})
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.cli.cache import list_cache, prune_cache
        from scoremode.reports.installation import cache_blocks, prune_blocks

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
        show(parsed, lambda: found, lambda: (prune_blocks if parsed.action else cache_blocks)(found))


def _refuse_flags_of_prune(parsed: argparse.Namespace) -> None:
    given = {"--older-than": parsed.older_than, "--larger-than": parsed.larger_than, "--dry-run": parsed.dry_run}
    for flag, value in given.items():
        if value not in (None, False):
            raise OptionError(f"{flag} belongs to prune", fix=f"type scoremode cache prune {flag} …")


def _refusing(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Makes a function for argparse, which shows the reason of a refusal."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
