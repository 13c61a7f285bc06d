"""The flags of ``scoremode show``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="a folder written with --out")
    parser.add_argument(
        "--worst", type=options.count, default=8, metavar="N", help="worst-predicted tokens to show (default: 8)"
    )
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.run import run_table
    from scoremode.store.runs import load

    found = load(parsed.run_folder)
    if parsed.json:
        options.print_json(found.summary())
    else:
        options.print_parts(run_table(found, parsed.worst))
