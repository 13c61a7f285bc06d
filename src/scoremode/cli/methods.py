"""The flags of ``scoremode methods``, and what it prints."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

from scoremode.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="METHOD", help="show this one with its windows drawn")
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.plan.recipes import Method, find_method, methods
    from scoremode.report.terminal.console import listing

    def facts(method: Method) -> dict[str, Any]:
        names = ("name", "summary", "context", "stride", "max_windows", "average", "special", "arrangement")
        return {name: getattr(method, name) for name in names} | {"drawn": inspect.getdoc(method.windows)}

    chosen = [find_method(parsed.name)] if parsed.name is not None else list(methods().found.values())
    if parsed.json:
        options.print_json([facts(method) for method in chosen])
    elif parsed.name is not None:
        without = f"{chosen[0].summary}\n(its windows are drawn in a docstring, which python -OO removes)"
        sys.stdout.write(f"{inspect.getdoc(chosen[0].windows) or without}\n")
    else:
        refused = [(one.name, f"cannot be used: {one.problem}") for one in methods().refused]
        options.print_parts(listing([*((m.name, m.summary) for m in chosen), *refused]))
