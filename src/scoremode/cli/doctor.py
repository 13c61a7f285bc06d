"""The flags of ``scoremode doctor``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options

EPILOG = "Exit code 2, with one line, if a self-test fails. Engines with processes of their own take up to a minute."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", help="test this one alone (default: all that are installed)")
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.doctor import doctor_table
    from scoremode.verbs.doctor import examine, require_good

    found = examine(parsed.engine)
    if parsed.json:
        options.print_json(found)
    else:
        options.print_parts(doctor_table(found))
    require_good(found)
