"""scoremode engines: what can turn a plan into scores here"""

from __future__ import annotations

import argparse

from scoremode.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.engines.registry import ENGINES
    from scoremode.report.terminal.console import listing

    if parsed.json:
        options.print_json([{"name": name, "summary": summary} for name, summary in ENGINES.items()])
    else:
        options.print_parts(listing(ENGINES.items()))
