"""The verbs about this installation and its cache folder: info and cache. Their flags, and what they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from scoremode.console import flags
from scoremode.console.flags import Verb
from scoremode.console.output import show


class InfoVerb(Verb):
    examples = (
        "scoremode info methods gptq",
        "scoremode info --test --engine transformers",
    )
    epilog = (
        "With --test: exit code 2, with one line, if a self-test fails. Engines with processes of their own take up to "
        "a minute."
    )
    renamed: ClassVar[Mapping[str, tuple[str, str]]] = {
        "methods": ("info methods {}", ""),
        "engines": ("info engines {}", ""),
        "doctor": ("info --test {}", ""),
    }

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"about ABOUT": "methods or engines alone (default: all that is installed)"}, nargs="?")
        flags.add(parser, {"name METHOD": "of methods: show this one with its windows drawn"}, nargs="?")
        flags.add(parser, {"--test": "let every engine that is installed score a model whose scores are known"})
        flags.add(parser, {"--engine ENGINE": "test this one alone"})
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.cli.info import info, require_good
        from scoremode.reports.installation import info_blocks

        facts: Any = info(parsed.about, parsed.name, test=parsed.test, engine=parsed.engine)
        if parsed.name is not None and not parsed.json:
            without = f"{facts[0]['summary']}\n(its windows are drawn in a docstring, which python -OO removes)"
            sys.stdout.write(f"{facts[0]['drawn'] or without}\n")  # as it is drawn, however wide the terminal is
            return
        show(parsed, lambda: facts, lambda: info_blocks(parsed.about, facts))
        if parsed.test:
            require_good(facts)


class CacheVerb(Verb):
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
        kinds = "only runs, references, prob, models, …; may be repeated (default: all)"
        parser.add_argument("--kind", action="append", metavar="KIND", help=kinds)
        prune = parser.add_argument_group("prune", "at least one of the first two")
        flags.add(prune, {"--older-than AGE": "what was not used for that long: 12h, 30d, 4w"})
        larger = "the least recently used, until the rest is at most that large: 500MB, 10GB"
        flags.add(prune, {"--larger-than SIZE": larger})
        flags.add(prune, {"--dry-run": "say what would be removed, and remove nothing"})
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.cli.cache import cache
        from scoremode.reports.installation import cache_blocks, prune_blocks

        how = {name: getattr(parsed, name) for name in ("older_than", "larger_than", "dry_run")}
        facts = cache(parsed.action, kind=parsed.kind or (), **how)
        show(parsed, lambda: facts, lambda: (prune_blocks if parsed.action else cache_blocks)(facts))
