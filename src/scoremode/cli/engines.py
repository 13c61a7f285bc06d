"""The flags of ``scoremode engines``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.engines import engines_table
    from scoremode.verbs.doctor import list_engines

    found = list_engines()
    if parsed.json:
        options.print_json(found)
    else:
        options.print_parts(engines_table(found))
